"""How alike a model's positions are, whatever stands there."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis.inputs import AnalysisInputs, TokenOrId, eval_mode, inputs_without_text, upcast_float32
from cutaway.lens.analysis.labeled_tensor import LabeledTensor
from cutaway.lens.sites import resolve_indices
from cutaway.lens.trace import trace
from cutaway.model import EncoderDecoder
from cutaway.model.positions import ScoreBias


def position_similarity(model: Any, token: TokenOrId, *, seq_len: int = 32, layer: int = 0) -> LabeledTensor:
    """Cosine between what two positions make of one token that is repeated.

    Positions that are added to the embedding are compared themselves; with RoPE, the token's keys as they are turned
    in `layer`, heads averaged. Without positions all are alike: 1 throughout.
    """
    this = inputs_without_text(model)
    if isinstance(this.model, EncoderDecoder):
        raise InputError("positions are compared in one text, and this model reads two; take a decoder or an encoder")
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
        raise InputError(f"seq_len is {seq_len!r}; give at least 2")
    layer = resolve_indices(layer, len(this.stack.blocks), "layer", "the model's blocks")[0]
    repeated = torch.full((1, seq_len), this.resolve_token(token, "the token to repeat"), device=this.model.device)
    this = AnalysisInputs(this.model, this.tokenizer, repeated, None)
    how, vectors = _position_vectors(this, layer)
    unit = F.normalize(upcast_float32(vectors), dim=-1)  # (T, heads, width)
    cosines = torch.einsum("ihd,jhd->hij", unit, unit).mean(0)
    places = tuple(str(place) for place in range(seq_len))
    return LabeledTensor(
        f"likeness of positions: {how}", cosines, ("position", "other position"), (places, places), "cosine"
    )


def _position_vectors(inputs: AnalysisInputs, layer: int) -> tuple[str, Tensor]:
    """What position does to vectors, and those vectors."""
    stack, length = inputs.stack, inputs.tokens.shape[1]
    added = stack.embed.position
    inside: Any = dict(stack.positions.items()).get(stack.layer_position_keys[layer])
    if added is None and isinstance(inside, ScoreBias):
        raise InputError(
            f"block {layer}'s positions are added to scores, and change no vector that could be compared; "
            "trace 'attn.scores' to see them"
        )
    name = f"{inputs.site_prefix}blocks.{layer}.attn.k"
    with eval_mode(inputs.model), trace(inputs.model, name) as t:
        inputs.run()  # refuses a length that the model has no positions for
        if added is not None:
            where = torch.arange(length, device=inputs.model.device)[None]
            return f"{type(added).__name__.removesuffix('Position').lower()}, added to the embedding", added(where)[0][
                :, None
            ]
    method = "no positions" if inside is None else "keys turned by RoPE"
    return f"{method}, block {layer}", t[name][0]
