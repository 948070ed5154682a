"""How a model of cutaway writes: greedily, by beams, speculatively; and how it draws and keeps what it read."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutaway.check.target import Target
from cutaway.generate import Engine, Plan, Settings
from cutaway.generate.beams import beam_search
from cutaway.generate.lookup import Lookup
from cutaway.generate.runner import at_rest
from cutaway.generate.sampling import Sampler
from cutaway.generate.speculate import Speculation
from cutaway.model import Cache, EncoderDecoder, Transformer

SPARE = 5
"""Slots of a cache that stay unused."""
Call = Callable[[Tensor, Cache], Tensor]


def add_writing(found: Target, model: Transformer, call: Call, source: Tensor | None = None) -> None:
    """All that is offered beside logits; an encoder-decoder writes behind a fixed source."""
    read = None if source is None else source[0].tolist()

    def written(rows: list[list[int]], n: int, draft: Any = None) -> Tensor:
        return torch.tensor([answer(model, row, n, read, draft) for row in rows], device=model.device)

    def beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        row = tokens[0].tolist()
        how = {"beams": k, "n": k, "max_new_tokens": n, "length_penalty": 0.0}
        with at_rest(model):
            if read is None:
                (ended,) = beam_search(model, [row], **how)  # type: ignore[arg-type]
            else:
                (ended,) = beam_search(model, [read], decoder_start=row[0], **how)  # type: ignore[arg-type]
        return torch.tensor([beam.tokens for beam in ended]), torch.tensor([beam.score for beam in ended])

    def speculate(tokens: Tensor, n: int) -> Tensor:
        """Rows in turn with guesses from the text before, and from the model itself: these all are kept."""
        return torch.cat(
            [written([row], n, model if number % 2 else Lookup()) for number, row in enumerate(tokens.tolist())]
        )

    found.generate = lambda tokens, n: written(tokens.tolist(), n)
    if read is None:
        found.generate_padded = lambda tokens, mask, n: together(
            model, [row[real].tolist() for row, real in zip(tokens, mask, strict=True)], n
        )
    found.beams, found.speculate, found.sample = beams, speculate, sample
    found.poisoned = lambda tokens, value: poisoned(model, call, tokens, value)
    if found.windows:
        found.rolled = lambda tokens, piece: in_pieces(
            call, tokens, model.new_cache(len(tokens), tokens.shape[1], chunk=piece), piece
        )


def settings(n: int) -> Settings:
    return Settings(max_new_tokens=n, ignore_eos=True)


def answer(model: Transformer, row: list[int], n: int, source: list[int] | None, draft: Any) -> list[int]:
    """What is written behind one text; with an encoder, the text is the beginning of the answer."""
    both = isinstance(model, EncoderDecoder)
    start = {"decoder_start": row[0], "source": len(source or [0])} if both else {}
    plan = Plan(model, rows=1, context=len(row) + n, compiled=False, **start)  # type: ignore[arg-type]
    engine = Engine(plan) if draft is None else Speculation(plan, draft=draft)
    begun = row[1:] if both else []
    ticket = engine.submit(source or row, settings(n + len(begun)), seed=0, begun=begun)
    run(engine, model)
    return ticket.result().tokens[len(begun) :]


def together(model: Transformer, rows: list[list[int]], n: int) -> Tensor:
    """What is written behind texts of different lengths in one batch."""
    engine = Engine(Plan(model, rows=len(rows), context=max(map(len, rows)) + n, compiled=False))
    tickets = [engine.submit(row, settings(n), seed=0) for row in rows]
    run(engine, model)
    return torch.tensor([ticket.result().tokens for ticket in tickets], device=model.device)


def run(engine: Any, model: Transformer) -> None:
    try:
        with at_rest(model):
            while engine.turn():
                continue
    finally:
        engine.runner.let_go()


def sample(
    logits: Tensor, n: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """One draw by each of n seeds."""
    sampler = Sampler(n, len(logits), logits.device)
    asked = Settings(temperature=temperature, top_k=top_k, top_p=top_p)
    sampler.set(0, asked, [], seed=0)
    for tensor in sampler.all.tensors():
        tensor[1:] = tensor[0].clone()
    sampler.all.whole[:, 0] = torch.arange(n)  # the seeds
    return sampler.sample(logits.expand(n, -1), sampler.needs(1)).tokens


def in_pieces(call: Call, tokens: Tensor, cache: Cache, piece: int) -> Tensor:
    """A text read in pieces of one size."""
    return torch.cat([call(tokens[:, start : start + piece], cache) for start in range(0, tokens.shape[1], piece)], 1)


def poisoned(model: Transformer, call: Call, tokens: Tensor, value: float) -> Tensor:
    """A text read in pieces in a cache that held something before. All slots are looked at, unless it is NaN: what has
    no weight is multiplied by 0, as an engine does that wipes slots before it gives them away."""
    cache = model.new_cache(len(tokens), tokens.shape[1] + SPARE)
    for layer in cache.layers:
        layer.k.fill_(value)
        layer.v.fill_(value)
    cache.fixed = math.isfinite(value)
    return in_pieces(call, tokens, cache, 7)
