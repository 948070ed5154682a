"""The model at work for many texts: prompts are read in pieces, and all rows take their next step together."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from cutaway.generate.cache import Rows
from cutaway.generate.sampling import Drawn, Sampler
from cutaway.generate.ticket import Ticket
from cutaway.model import Transformer
from cutaway.model.cache import Cache


class Runner:
    """One model, its cache and its sampler on one device. Nothing else touches them."""

    def __init__(self, model: Transformer, cache: Rows) -> None:
        self.model: Any = model
        self.cache = cache
        self.sampler = Sampler(cache.batch, model.config.vocab_size, model.device)
        self.next = torch.zeros(cache.batch, 1, dtype=torch.long, device=model.device)
        """Of each row, the token that its next step reads."""
        self.encodes = "encoder" in model.stacks

    @torch.no_grad()
    def open(self, row: int, ticket: Ticket, eos: Collection[int]) -> None:
        """Give a row to a request; a source is read now."""
        self.cache.open(row, ticket.read, ticket.pages)
        self.sampler.set(row, ticket.settings, ticket.tokens, ticket.seed, eos=eos)
        if ticket.source is not None:
            self.read_source(row, ticket.source, ticket.tokens)

    def close(self, row: int) -> None:
        self.cache.close(row)
        self.sampler.clear(row)

    @torch.no_grad()
    def read(self, start: int, pieces: Sequence[Sequence[int]], before: Sequence[int]) -> None:
        """Read a piece of each of these rows' texts, of which they have read `before` tokens."""
        longest = max(map(len, pieces))
        tokens = torch.tensor([[*piece, *[0] * (longest - len(piece))] for piece in pieces])
        mask = None
        if any(len(piece) < longest for piece in pieces):
            mask = torch.tensor([[True] * len(piece) + [False] * (longest - len(piece)) for piece in pieces])
            mask = mask.to(self.model.device)
        part = self.cache.part(start, start + len(pieces), most=max(before))
        self.hidden(tokens.to(self.model.device), mask, part)

    @torch.no_grad()
    def read_source(self, row: int, source: Sequence[int], first: Sequence[int]) -> None:
        """Let an encoder read a row's source; `first` is what the decoder begins with."""
        alone: Cache = self.model.new_cache(1, len(first))
        device = self.model.device
        self.model.hidden(
            torch.tensor([list(source)], device=device), torch.tensor([list(first)], device=device), cache=alone
        )
        self.cache.remember_source(row, alone)

    @torch.no_grad()
    def step(self, rows: int, most: int) -> Drawn:
        """The next token of the first `rows` rows, none of which has read more than `most`."""
        part = self.cache.part(0, rows, most=most)
        logits = self.model.head(self.hidden(self.next[:rows], None, part))[:, -1]
        drawn = self.sampler.sample(logits, self.sampler.needs(rows))
        self.next[:rows, 0] = drawn.tokens
        return drawn

    def hidden(self, tokens: Tensor, mask: Tensor | None, cache: Rows) -> Tensor:
        if self.encodes:
            return self.model.hidden(None, tokens, None, mask, cache=cache)
        return self.model.hidden(tokens, mask, cache=cache)

    def swap(self, a: int, b: int) -> None:
        """Two texts change rows."""
        if a != b:
            self.cache.swap(a, b)
            self.sampler.swap(a, b)
            self.next[[a, b]] = self.next[[b, a]]
