"""How a model of transformers writes: with its own `generate`, greedily, by beams, speculatively, and by draws."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cutaway.check.exam import CannotError
from cutaway.check.target import Target

SPARE = 5
"""Slots of a fixed cache that stay unused."""
Inputs = Callable[[Tensor, Tensor | None], dict[str, Any]]
"""A text and its mask, as `generate` is to be told of them."""


def add_writing(found: Target, model: Any, inputs: Inputs) -> None:
    """All that `generate` offers. `inputs` tells it of the text that it goes on from."""

    def write(tokens: Tensor, n: int, mask: Tensor | None = None, **how: Any) -> Tensor:
        return generated(model, n, inputs(tokens, mask), **how)[:, -n:]

    def row_by_row(tokens: Tensor, n: int, **how: Any) -> Tensor:
        """One text at a time: those that begin otherwise have other starts, and guesses are made for one only."""
        return torch.cat([write(tokens[row : row + 1], n, **how) for row in range(len(tokens))])

    def beams(tokens: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
        how = {"num_beams": k, "num_return_sequences": k, "length_penalty": 0.0}
        told = {"return_dict_in_generate": True, "output_scores": True}
        out = generated(model, n, inputs(tokens, None), **how, **told)
        return out.sequences[:, -n:], out.sequences_scores

    def speculate(tokens: Tensor, n: int) -> Tensor:
        try:
            return row_by_row(tokens, n, prompt_lookup_num_tokens=3)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "crop" not in str(error):  # how its rolling caches say no
                raise
            raise CannotError(f"it refuses to speculate: {str(error)[:100]}") from error

    both = found.kind == "encoder-decoder"
    found.generate = row_by_row if both else write
    if not both:
        found.generate_padded = lambda tokens, mask, n: write(tokens, n, mask)
    found.beams, found.speculate = beams, speculate
    found.sample = drawer(model, inputs)


@contextmanager
def plainly(model: Any) -> Iterator[Any]:
    """Without the settings that came with the checkpoint: ends, forced and forbidden tokens, penalties."""
    before = model.generation_config
    try:
        model.generation_config = type(before)(pad_token_id=0)
        yield model.generation_config
    finally:
        model.generation_config = before


def generated(model: Any, n: int, inputs: dict[str, Any], **how: Any) -> Any:
    """What its own `generate` gives for n tokens more."""
    how = {"do_sample": False, "num_beams": 1, "max_new_tokens": n} | how
    with plainly(model):
        return model.generate(**inputs, **how)


def drawer(model: Any, inputs: Inputs) -> Callable[..., Tensor]:
    """Draws by its own `generate`, which is given known logits in place of the model's."""

    def sample(logits: Tensor, n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
        start = torch.full((n, 1), 1, device=logits.device)
        known = [lambda _, scores: logits.to(scores.dtype).expand(len(scores), -1)]
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "logits_processor": known}
        return generated(model, 1, inputs(start, None), do_sample=True, **how)[:, -1]

    return sample


def fixed_cache(model: Any, call: Callable[[Tensor, Any], Any]) -> Callable[[Tensor, float], Tensor]:
    """A pass in a cache of fixed size, in whose slots something was before."""

    def poisoned(tokens: Tensor, value: float) -> Tensor:
        kind = getattr(sys.modules.get("transformers.cache_utils"), "StaticCache", None)
        if kind is None:
            raise CannotError("this version of transformers has no StaticCache")
        if not getattr(model, "_can_compile_fullgraph", False):
            raise CannotError("it says that it takes no cache of fixed size")
        cache = kind(config=model.config, max_cache_len=tokens.shape[1] + SPARE)
        call(tokens[:, :1], cache)  # makes its buffers
        cache.reset()
        for layer in cache.layers:
            layer.keys.fill_(value)
            layer.values.fill_(value)
        return torch.cat([call(piece, cache) for piece in (tokens[:, :7], tokens[:, 7:])], 1)

    return poisoned
