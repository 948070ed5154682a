"""How alike a model's positions are, whatever stands there."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.choice import numbers
from cutaway.lens.readings.reading import Reading
from cutaway.lens.readings.subject import Subject, Token, alone, resting, wide
from cutaway.lens.trace import trace
from cutaway.model import EncoderDecoder
from cutaway.model.positions import ScoreBias


def position_similarity(model: Any, token: Token, *, length: int = 32, layer: int = 0) -> Reading:
    """Cosine between what two positions make of one token that is repeated.

    Positions that are added to the embedding are compared themselves; with RoPE, the token's keys as they are turned
    in `layer`, heads averaged. Without positions all are alike: 1 throughout.
    """
    this = alone(model)
    if isinstance(this.model, EncoderDecoder):
        raise InputError("positions are compared in one text, and this model reads two; take a decoder or an encoder")
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise InputError(f"length is {length!r}; give at least 2")
    layer = numbers(layer, len(this.stack.blocks), "layer", "the model's blocks")[0]
    repeated = torch.full((1, length), this.token(token, "the token to repeat"), device=this.model.device)
    this = Subject(this.model, this.tokenizer, repeated, None)
    how, vectors = vectors_of(this, layer)
    unit = F.normalize(wide(vectors), dim=-1)  # (T, heads, width)
    cosines = torch.einsum("ihd,jhd->hij", unit, unit).mean(0)
    places = tuple(str(place) for place in range(length))
    return Reading(f"likeness of positions: {how}", cosines, ("position", "other position"), (places, places), "cosine")


def vectors_of(this: Subject, layer: int) -> tuple[str, Tensor]:
    """What position does to vectors, and those vectors."""
    stack, length = this.stack, this.tokens.shape[1]
    added = stack.embed.position
    inside: Any = dict(stack.positions.items()).get(stack.position_of[layer])
    if added is None and isinstance(inside, ScoreBias):
        raise InputError(
            f"block {layer}'s positions are added to scores, and change no vector that could be compared; "
            "trace 'attn.scores' to see them"
        )
    name = f"{this.prefix}blocks.{layer}.attn.k"
    with resting(this.model), trace(this.model, name) as t:
        this.run()  # refuses a length that the model has no positions for
        if added is not None:
            where = torch.arange(length, device=this.model.device)[None]
            return f"{type(added).__name__.lower()}, added to the embedding", added(where)[0][:, None]
    method = "no positions" if inside is None else "keys turned by RoPE"
    return f"{method}, block {layer}", t[name][0]
