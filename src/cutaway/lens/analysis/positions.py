"""Similarity between positions, measured with the same token at every position."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import ModelLike
from cutaway.lens.adapters.described_model import DescribedModel
from cutaway.lens.analysis.inputs import AnalysisInputs, TokenOrId, inputs_without_text, upcast_float32
from cutaway.lens.equations import position_module
from cutaway.lens.labeled_tensor import LabeledTensor
from cutaway.lens.sites import resolve_index
from cutaway.model import EncoderDecoder
from cutaway.model.positions import Disentangled, ScoreBias


def position_similarity(model: ModelLike, token: TokenOrId, *, seq_len: int = 32, layer: int = 0) -> LabeledTensor:
    """Cosine similarity between positions, on a text that repeats one token: position × other position.

    If positions are added to the embedding, the position vectors are compared directly. With RoPE, the rotated keys in
    `layer` are compared, averaged over heads. Without position information all values are 1.
    """
    inputs = inputs_without_text(model)
    if isinstance(inputs.structure, EncoderDecoder):
        raise InputError("position_similarity needs a model with one stack; pass a decoder or an encoder")
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 2:
        raise InputError(f"seq_len is {seq_len!r}; pass an integer of at least 2")
    layer = resolve_index(layer, len(inputs.blocks), "layer", "the model's blocks")
    if isinstance(inputs.model, DescribedModel) and inputs.model.is_stated:
        problem = f"the position method of a {type(inputs.module).__name__} is not known"
        raise InputError(f"{problem}; pass a cutaway or transformers model, or compare activations of ct.trace")
    repeated = torch.full((1, seq_len), inputs.resolve_token(token, "token"), device=inputs.device)
    method, vectors = _position_vectors(replace(inputs, tokens=repeated), layer)
    unit = F.normalize(upcast_float32(vectors), dim=-1)  # (T, H, D)
    cosines = torch.einsum("ihd,jhd->hij", unit, unit).mean(0)
    title, labels = f"similarity of positions: {method}", tuple(str(position) for position in range(seq_len))
    return LabeledTensor(title, cosines, ("position", "other position"), (labels, labels), "cosine")


def _position_vectors(inputs: AnalysisInputs, layer: int) -> tuple[str, Tensor]:
    """Return a description of the position method, and one vector per position and head, (T, H, D)."""
    embed_position, layer_position = inputs.stack.embed.position, position_module(inputs.stack, layer)
    if embed_position is None and isinstance(layer_position, ScoreBias | Disentangled):
        raise InputError(f"block {layer} adds positions to scores, so it has no position vectors; trace 'attn.scores'")
    name = f"{inputs.site_prefix}blocks.{layer}.attn.k"
    t = inputs.trace(name)  # raises if seq_len exceeds the model's positions
    if embed_position is not None:
        method = f"{type(embed_position).__name__.removesuffix('Position').lower()}, added to the embedding"
        positions = torch.arange(inputs.tokens.shape[1], device=inputs.device)[None]
        return method, embed_position(positions)[0].detach()[:, None]
    method = "no positions" if layer_position is None else "keys rotated by RoPE"
    return f"{method}, block {layer}", t[name][0]
