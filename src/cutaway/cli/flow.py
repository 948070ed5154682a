"""Answers as they come: an engine driven from the terminal's own thread, with a clock beside it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cutaway.generate.answer import Generation, Piece
from cutaway.generate.engine import Engine
from cutaway.generate.prompts import Prompt
from cutaway.generate.settings import Settings
from cutaway.generate.speculate import Speculation
from cutaway.generate.texts import begin as start
from cutaway.generate.texts import prepare
from cutaway.generate.ticket import Ticket

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint


class Flow:
    """Requests and their engine. Whoever asks for the pieces of one lets all of them go on."""

    def __init__(self, engine: Engine | Speculation, tickets: Sequence[Ticket] = ()) -> None:
        self.engine = engine
        self.tickets: list[Ticket] = []
        self.began: dict[Ticket, float] = {}
        self.first: dict[Ticket, float] = {}
        self.at_first: dict[Ticket, int] = {}
        """Tokens that were there then: guessed ahead, several come at once."""
        self.last: dict[Ticket, float] = {}
        self.counts: dict[Ticket, int] = {}
        for ticket in tickets:
            self.add(ticket)
        self.steps = 0
        """Of the engine, since the first token."""

    def submit(self, prompt: Sequence[int], settings: Settings, *, seed: int, begun: Sequence[int] = ()) -> Ticket:
        ticket = self.engine.submit(prompt, settings, seed=seed, begun=begun)
        self.add(ticket)
        return ticket

    def add(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.began[ticket] = time.perf_counter()
        self.counts[ticket] = len(ticket.begun)

    def pieces(self, ticket: Ticket) -> Iterator[Piece]:
        """What each step adds to this answer; other answers grow meanwhile."""
        over = False
        while not over:
            over = ticket.done.is_set()
            yield from ticket.arrived()
            if not over:
                self.turn()

    def turn(self) -> None:
        working = self.engine.turn()
        now = time.perf_counter()
        self.steps += bool(self.first)
        for ticket in self.tickets:
            count = len(ticket.answer.tokens)
            if count > self.counts[ticket]:
                if ticket not in self.first:
                    self.first[ticket], self.at_first[ticket] = now, count
                self.last[ticket] = now
                self.counts[ticket] = count
        assert working or all(ticket.done.is_set() for ticket in self.tickets)

    # What the clock says

    @property
    def tokens(self) -> int:
        return sum(self.counts.values())

    def rate(self, ticket: Ticket) -> float | None:
        """Tokens a second of one answer, without the wait for its first."""
        took = self.last[ticket] - self.first[ticket] if ticket in self.first else 0.0
        return (self.counts[ticket] - self.at_first[ticket]) / took if took > 0 else None

    @property
    def decoding(self) -> float:
        """Seconds between the first token and the last."""
        return max(self.last.values()) - min(self.first.values()) if self.first else 0.0

    @property
    def decoded(self) -> int:
        """Tokens that came in these seconds."""
        began = min(self.first.values(), default=0.0)
        return self.tokens - sum(self.at_first[ticket] for ticket, at in self.first.items() if at == began)

    @property
    def wait(self) -> float:
        """Seconds until the first token."""
        return min(self.first[ticket] - self.began[ticket] for ticket in self.first) if self.first else 0.0

    @property
    def context(self) -> int:
        """Tokens of a text, in the middle of its answer, on average."""
        lengths = [len(ticket.tokens) + self.counts[ticket] / 2 for ticket in self.tickets]
        return max(1, round(sum(lengths) / len(lengths)))


def begin(
    checkpoint: "Checkpoint",
    prompts: Sequence[Prompt],
    asked: Settings,
    *,
    rows: int | None,
    draft: Any = None,
    **how: Any,
) -> tuple[Flow, list[Ticket]]:
    """An engine for these prompts, with a request for each answer, in order; as `generate` would answer them."""
    work = prepare(checkpoint, list(prompts), asked, rows=rows, **how)
    engine, tickets = start(work, asked, draft=draft)
    return Flow(engine, tickets), tickets


def told(given: Any, answer: Generation, rate: float | None) -> Mapping[str, Any]:
    """An answer as data."""
    from dataclasses import asdict

    from cutaway.cli.convert import plain

    return plain({"prompt": given, **asdict(answer), "tokens_per_second": rate})
