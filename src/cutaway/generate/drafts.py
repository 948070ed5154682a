"""Who guesses the next tokens, so that a model can read several at once; and the one who does it by a smaller model."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.distribution import Needs, Rows, draw, probabilities
from cutaway.generate.noise import uniform
from cutaway.generate.plan import Plan
from cutaway.generate.runner import Runner
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.text import Tokenizer

DRAFTED = 1
"""The stream of random numbers that drafts are drawn by; a token of the model's own is drawn by stream 0."""


class Proposal(NamedTuple):
    """Guesses for n rows: the first `counts[i]` of row i's tokens."""

    tokens: Int64[Tensor, "n k"]
    counts: list[int]
    chances: list[Float32[Tensor, "n V"]] | None = None
    """What each was drawn from; None if they were not drawn, but are certain."""


class Drafter(Protocol):
    """Follows the texts in their rows and guesses how they go on."""

    def open(self, tickets: Sequence[Ticket]) -> None:
        """Take in texts that come into rows one behind the other."""
        ...

    def swap(self, a: int, b: int) -> None: ...

    def propose(self, tickets: Sequence[Ticket], wanted: Sequence[int], rows: Rows, needs: Needs) -> Proposal:
        """Up to `wanted` tokens for each row; `rows` are a copy that may be led ahead."""
        ...

    def keep(self, kept: Sequence[int]) -> None:
        """Of what each row's text was with all its guesses, only the first `kept` tokens are still true."""
        ...


class ModelDraft:
    """Guesses by a smaller model, under the same settings as the model's own tokens."""

    def __init__(self, model: Transformer, plan: Plan, ahead: int) -> None:
        """`plan` is that of the model to guess for."""
        self.size, self.device = plan.model.config.vocab_size, plan.model.device
        self.last = model.config.vocab_size - 1
        stack = model.stacks["decoder"]
        learned = getattr(stack.embed.position, "length", None)
        self.longest = min([n for n in (plan.slots, learned, *stack.turns) if n is not None])
        """Tokens up to which the draft can read; there it falls silent."""
        how = {"rows": plan.rows, "source": plan.source, "chunk": plan.chunk, "decoder_start": plan.decoder_start}
        own = Plan(model, context=max(2, self.longest), **how)  # type: ignore[arg-type]
        own = roomy(own, ahead + 1)  # a row that is silent is padded as others read the two tokens that were said since
        self.runner = Runner(model, own.cache(), fast=False)
        self.chunk = own.chunk
        self.read = [0] * plan.rows

    def open(self, tickets: Sequence[Ticket]) -> None:
        texts = [self.known(ticket.text) if len(ticket.text) <= self.longest else [] for ticket in tickets]
        for ticket, text in zip(tickets, texts, strict=True):
            assert ticket.row is not None
            self.runner.cache.open(ticket.row)
            if ticket.source is not None and text:
                self.runner.read_source(ticket.row, ticket.source, text)
        first = tickets[0].row or 0
        self.read[first : first + len(texts)] = read_prompts(self.runner, first, texts, [0] * len(texts), self.chunk)

    def swap(self, a: int, b: int) -> None:
        self.runner.swap(a, b)
        self.read[a], self.read[b] = self.read[b], self.read[a]

    def propose(self, tickets: Sequence[Ticket], wanted: Sequence[int], rows: Rows, needs: Needs) -> Proposal:
        texts = [ticket.text for ticket in tickets]
        room = [max(0, self.longest + 1 - len(text)) for text in texts]  # the last guess is not read
        counts = [min(pair) for pair in zip(wanted, room, strict=True)]
        if not any(counts):
            return Proposal(torch.zeros(len(counts), 0, dtype=torch.long, device=self.device), counts)
        guesses: list[Tensor] = []
        chances: list[Tensor] = []
        left = torch.tensor(counts, device=self.device)
        logits = self.catch_up(
            [text[n:] if count else [] for text, n, count in zip(texts, self.read, counts, strict=False)]
        )
        for turn in range(max(counts)):
            if turn > 0:
                logits = self.step(guesses[-1], [count > turn for count in counts])
            q = certain_if_broken(probabilities(self.fitted(logits), rows, needs))
            guess = draw(q, uniform(rows.whole[:, 0], rows.step, DRAFTED))
            rows.advance(guess, left > turn, needs)
            guesses.append(guess)
            chances.append(q)
        return Proposal(torch.stack(guesses, -1), counts, chances)

    def catch_up(self, pieces: Sequence[Sequence[int]]) -> Float[Tensor, "n V"]:
        """Read what was said since; the logits after it, which mean nothing where nothing was read."""
        longest = max(map(len, pieces))
        tokens = torch.tensor([[*self.known(piece), *[0] * (longest - len(piece))] for piece in pieces])
        mask = None
        if any(len(piece) < longest for piece in pieces):
            mask = torch.tensor([[place < len(piece) for place in range(longest)] for piece in pieces])
        x = self.hidden(tokens, mask)
        ends = torch.tensor([max(0, len(piece) - 1) for piece in pieces], device=x.device)
        for row, piece in enumerate(pieces):
            self.read[row] += len(piece)
        return self.runner.model.head(x[torch.arange(len(x), device=x.device), ends])

    def step(self, tokens: Int64[Tensor, " n"], active: Sequence[bool]) -> Float[Tensor, "n V"]:
        """Read the guesses of the active rows; the logits after them."""
        mask = None if all(active) else torch.tensor(active).unsqueeze(-1)
        x = self.hidden(tokens.clamp(max=self.last).unsqueeze(-1), mask)
        for row, reads in enumerate(active):
            self.read[row] += reads
        return self.runner.model.head(x[:, -1])

    def hidden(self, tokens: Int64[Tensor, "n T"], mask: Bool[Tensor, "n T"] | None) -> Float[Tensor, "n T d"]:
        part = self.runner.cache.part(0, len(tokens), most=max(self.read[: len(tokens)]))
        device = part.length.device
        return self.runner.hidden(self.runner.model, tokens.to(device), None if mask is None else mask.to(device), part)

    def fitted(self, logits: Float[Tensor, "n W"]) -> Float[Tensor, "n V"]:
        """To the model's vocabulary: padding is cut off, and what the draft does not have is never guessed."""
        return torch.nn.functional.pad(logits.to(self.device), (0, self.size - logits.shape[-1]), value=-torch.inf)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Padding of the model's vocabulary may be more than the draft's has; a guess after it is as good as any."""
        return [min(token, self.last) for token in tokens]

    def keep(self, kept: Sequence[int]) -> None:
        kept = [min(pair) for pair in zip(self.read, kept, strict=False)]
        if kept != self.read[: len(kept)]:
            part = self.runner.cache.part(0, len(kept), most=max(self.read))
            part.rewind(torch.tensor(kept, device=part.length.device))
            self.read[: len(kept)] = kept


def read_prompts(
    runner: Runner, first: int, texts: Sequence[Sequence[int]], read: Sequence[int], chunk: int
) -> list[int]:
    """Read all but the last token of texts in rows from `first` on, of which `read` are known; how many are then.

    Those that go on from the same place are read together, in passes of at most `chunk` tokens.
    """
    ends = [max(0, len(text) - 1) for text in texts]
    start = 0
    while start < len(texts):
        before, longest, stop = read[start], ends[start] - read[start], start + 1
        while stop < len(texts) and read[stop] == before:
            wider = max(longest, ends[stop] - before)
            if wider * (stop + 1 - start) > chunk:
                break
            longest, stop = wider, stop + 1
        for at in range(before, before + longest, chunk):
            pieces = [texts[i][at : min(ends[i], at + chunk)] for i in range(start, stop)]
            runner.read(first + start, pieces, [at] * len(pieces))
        start = stop
    return ends


def certain_if_broken(q: Float32[Tensor, "n V"]) -> Float32[Tensor, "n V"]:
    """A draft whose logits are NaN, or who may say nothing, guesses token 0: what it guesses need not be good."""
    first = torch.zeros_like(q[0])
    first[0] = 1
    return torch.where(q.sum(-1, keepdim=True).isfinite(), q, first)


def roomy(plan: Plan, ahead: int) -> Plan:
    """The plan with room for guesses: behind the text (where padding goes, which has no position) and in rings."""
    plan = copy.copy(plan)
    plan.slots += ahead
    plan.chunk = max(plan.chunk, ahead + 1)
    return plan


def check_draft(
    model: Transformer, tokenizer: Tokenizer | None, draft: Transformer, draft_tokenizer: Tokenizer | None
) -> None:
    """A draft must be of the same form and mean the same by its tokens."""
    if draft.stacks.keys() != model.stacks.keys():
        forms = [" and ".join(each.stacks) for each in (draft, model)]
        raise InputError(f"the draft is {forms[0]}, and the model {forms[1]}; use a draft of the same form")
    for name in ("vocab_size", "source_vocab_size"):
        mine, theirs = (getattr(each.config, name, None) for each in (model, draft))
        named = name == "vocab_size" and tokenizer is not None and draft_tokenizer is not None
        if mine != theirs and not named:
            raise InputError(
                f"the draft's {name} is {theirs}, and the model's {mine}; use a draft with the same tokens"
            )
    if tokenizer is None or draft_tokenizer is None:
        return
    for number in range(max(tokenizer.vocab_size, draft_tokenizer.vocab_size)):
        ours, theirs = tokenizer.token(number), draft_tokenizer.token(number)
        if ours != theirs:
            raise InputError(
                f"token {number} is {ours!r} to the model and {theirs!r} to the draft; use a draft with the same tokens"
            )
