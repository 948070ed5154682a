"""Guesses without a model: a text's last tokens may have stood there before, and what followed may follow again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cutaway.errors import InputError
from cutaway.generate.distribution import Needs, Rows
from cutaway.generate.drafts import Proposal
from cutaway.generate.plan import Plan
from cutaway.generate.ticket import Ticket


@dataclass(frozen=True)
class Lookup:
    """Prompt lookup: what followed when the text's last tokens stood there before (Saxena 2023). Costs no model."""

    longest: int = 3
    """How many of the last tokens are looked for; if they are not found, one less, and so on."""
    shortest: int = 2
    """With fewer than this, nothing is guessed."""

    def __post_init__(self) -> None:
        for name in ("longest", "shortest"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; give a whole number of tokens from 1")
        if self.shortest > self.longest:
            raise InputError(f"shortest is {self.shortest}, more than longest, {self.longest}; lower it")


class Repeats:
    """A text that grows, and where each of its short sequences last stood."""

    def __init__(self, how: Lookup, text: Iterable[int] = ()) -> None:
        self.how = how
        self.text: list[int] = []
        self.after: dict[tuple[int, ...], int] = {}
        """By sequence: where what followed it begins."""
        self.grow(text)

    def grow(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            end = len(self.text)
            for length in range(self.how.shortest, min(self.how.longest, end) + 1):
                self.after[tuple(self.text[end - length :])] = end
            self.text.append(token)

    def follow(self, count: int) -> list[int]:
        """What came after the longest end of the text that stood there before; nothing if none did.

        Where that reaches the end of the text it goes on with itself, so what repeats is repeated.
        """
        text = self.text
        for length in range(min(self.how.longest, len(text)), self.how.shortest - 1, -1):
            start = self.after.get(tuple(text[-length:]))
            if start is not None:
                period = len(text) - start
                return [text[start + i % period] for i in range(count)]
        return []


class LookupDraft:
    """Guesses by `Lookup`; a source in the same vocabulary is looked through too."""

    def __init__(self, how: Lookup, plan: Plan) -> None:
        self.how, self.device = how, plan.model.device
        self.sources = getattr(plan.model.config, "source_vocab_size", None) is None
        self.repeats: list[Repeats] = [Repeats(how)] * plan.rows
        self.before = [0] * plan.rows
        """Tokens of the source, in front of each row's own text."""

    def open(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            assert ticket.row is not None
            source = ticket.source if ticket.source is not None and self.sources else []
            self.repeats[ticket.row] = Repeats(self.how, [*source, *ticket.text])
            self.before[ticket.row] = len(source)

    def swap(self, a: int, b: int) -> None:
        self.repeats[a], self.repeats[b] = self.repeats[b], self.repeats[a]
        self.before[a], self.before[b] = self.before[b], self.before[a]

    def propose(self, tickets: Sequence[Ticket], wanted: Sequence[int], rows: Rows, needs: Needs) -> Proposal:
        runs = []
        for row, (ticket, count) in enumerate(zip(tickets, wanted, strict=True)):
            repeats = self.repeats[row]
            repeats.grow(ticket.text[len(repeats.text) - self.before[row] :])
            runs.append(repeats.follow(count))
        counts = [len(run) for run in runs]
        longest = max(counts)
        tokens = torch.tensor([[*run, *[0] * (longest - len(run))] for run in runs], dtype=torch.long)
        return Proposal(tokens.view(len(runs), longest).to(self.device), counts)

    def keep(self, kept: Sequence[int]) -> None:
        """Guesses were never written down."""
