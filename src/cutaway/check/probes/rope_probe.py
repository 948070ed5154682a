"""Trace how RoPE rotates q and k, on a sequence of one repeated token, so that only the position differs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import get_config, self_attention_configs
from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.numerics import LOW_PRECISION_DTYPES, NOISE_MARGIN
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.probes.scale_tracer import ScaleTracer
from cutaway.config import LatentAttention
from cutaway.config import Rope as RopeConfig
from cutaway.model.masks import TokenPositions
from cutaway.model.rope import Rope

_NEAR_POSITIONS = (0, 1, 2, 3, 4, 5, 7, 11)
_FAR_POSITIONS = (29, 59, 113, 251, 509, 1021, 2039, 4093)
_MAX_POSITION_WITH_CONFIG, _MAX_POSITION_WITHOUT_CONFIG = 4096, 64
"""Upper limit of the probed positions if `max_seq_len` is unknown: with a known configuration, and without one."""
_ROUNDING_TOLERANCE = 1e-3
"""Tolerance relative to the largest value; it is above any rounding error."""


@dataclass
class RopeLayer:
    """One attention call on a repeated token at `positions`, and the RoPE configuration of its layer."""

    attention: AttentionCall
    positions: Tensor
    rope: RopeConfig | None
    is_latent: bool = False
    max_elementwise: float | None = None

    @property
    def head_dim(self) -> int:
        return require(self.attention.q).shape[-1]

    @property
    def rotary_dim(self) -> int:
        rotary_dim = None if self.rope is None else self.rope.rotary_dim
        return self.head_dim if rotary_dim is None else min(rotary_dim, self.head_dim)

    @property
    def module_path(self) -> str | None:
        return self.attention.module or None

    def queries_and_keys(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ("queries", q) and ("keys", k), where q and k are (H, T, D) of the first row of the batch."""
        yield "queries", require(self.attention.q)[0].float()
        yield "keys", require(self.attention.k)[0].float()


def get_rope_configs(ctx: CheckContext) -> list[tuple[RopeConfig | None, bool]] | None:
    """(RoPE configuration or None, whether attention is latent) of each layer; None if the configuration is unknown.

    If the user passed `rope=`, the only entry is for all layers.
    """
    if ctx.model.rope is not None:
        return [(RopeConfig.model_validate({"kind": "rope", **ctx.model.rope}), False)]
    config = get_config(ctx.model)
    if config is None:
        return None
    ropes = []
    for layer in self_attention_configs(config):
        rope: Any = layer.position if isinstance(layer.position, RopeConfig) else None
        if rope is not None and isinstance(layer, LatentAttention):
            rope = rope.model_copy(update={"rotary_dim": layer.d_rope})
        ropes.append((rope, isinstance(layer, LatentAttention)))
    return ropes


def trace_rope_layers(ctx: CheckContext, *, beyond_length: int | None = None) -> list[RopeLayer]:
    """Run one repeated token; return the attention calls whose q and k differ between positions only by the rotation.

    If the model takes positions, the token is at near and far positions, or at near positions and beyond
    `beyond_length`. Otherwise the positions are 0, 1, 2, …
    """
    ropes, model = get_rope_configs(ctx), ctx.model
    limit = model.max_seq_len or (
        _MAX_POSITION_WITHOUT_CONFIG if ropes is None or model.rope is not None else _MAX_POSITION_WITH_CONFIG
    )
    probed = [position for position in (*_NEAR_POSITIONS, *_FAR_POSITIONS) if position < limit]
    if beyond_length is not None:
        probed = [*_NEAR_POSITIONS, beyond_length + 5, 2 * beyond_length + 7]
    if model.logits_with_positions is None:
        length = min(ctx.seq_len, 13) if beyond_length is None else beyond_length + 3
        # Not 9, which is the source length of encoder-decoders: self- and cross-attention must differ in shape.
        probed = list(range(length if length != 9 else 8))
    seq_len = len(probed)
    positions = torch.tensor([probed], device=model.device)
    tokens = ctx.random_tokens(1, 1).expand(-1, seq_len).contiguous()
    with ScaleTracer(model.module) as tracer:
        if model.logits_with_positions is None:
            ctx.logits(tokens)
        else:
            model.logits_with_positions(tokens, positions)
    # Self-attention only: (T, T) scores, or (T, T + 1) with an attention sink.
    calls = [call for call in tracer.attentions if call.scores.shape[-2] == seq_len]
    calls = [call for call in calls if call.scores.shape[-1] - seq_len in (0, 1)]
    ropes = ropes * len(calls) if model.rope is not None and ropes is not None else ropes
    layer_ropes = ropes if ropes is not None and len(ropes) == len(calls) else [(None, False)] * len(calls)
    modules = {call.module for call in calls}
    scales = [scale for scale in tracer.attention_scales if scale.is_square and scale.module in modules]
    maxima = [scale.scores.max_elementwise for scale in scales] if len(scales) == len(calls) else [None] * len(calls)
    return [
        RopeLayer(call, positions[0], rope, is_latent, max_elementwise)
        for call, (rope, is_latent), max_elementwise in zip(calls, layer_ropes, maxima, strict=True)
        if call.q is not None and call.k is not None and _has_constant_values(call)
    ]


def _has_constant_values(attention: AttentionCall) -> bool:
    """Whether v does not depend on the position. Then q and k do not depend on it either, before the rotation."""
    return attention.v is not None and max_relative_change(attention.v[0].float()) < _ROUNDING_TOLERANCE


def max_relative_change(x: Tensor) -> float:
    """Largest absolute difference between x (…, T, D) at position 0 and at any other position, divided by the largest
    absolute value of x."""
    return float((x - x[..., :1, :]).abs().max()) / max(float(x.abs().max()), 1e-30)


def rotary_pairs(x: Tensor, layout: str, rotary_dim: int, start: int) -> Tensor:
    """The pairs of dimensions of x (…, T, D) that RoPE rotates, as complex numbers (…, T, rotary_dim / 2)."""
    rotary = x[..., start : start + rotary_dim]
    a, b = (rotary[..., 0::2], rotary[..., 1::2]) if layout == "interleaved" else rotary.chunk(2, -1)
    return torch.complex(a.contiguous(), b.contiguous())


def rotation_error(x: Tensor, layout: str, rotary_dim: int, start: int) -> float:
    """How far x (…, T, D) is from a rotation by position; 0 for an exact rotation.

    It is the largest change since position 0 in the norm of a rotated pair or in an unrotated dimension, divided by the
    largest absolute value of x.
    """
    size = max(float(x.abs().max()), 1e-30)
    norms = rotary_pairs(x, layout, rotary_dim, start).abs()
    worst = float((norms - norms[..., :1, :]).abs().max()) / size
    rest = torch.cat((x[..., :start], x[..., start + rotary_dim :]), -1)
    return max(worst, float((rest - rest[..., :1, :]).abs().max()) / size if rest.numel() else 0.0)


def find_rotation_layouts(x: Tensor, tolerance: float) -> set[tuple[str, int, int]]:
    """All triples (layout, rotary_dim, first rotated dimension) for which x (…, T, D) is a rotation by position."""
    head_dim = x.shape[-1]
    layouts = set()
    for rotary_dim in range(2, head_dim + 1, 2):
        for start in {0, head_dim - rotary_dim}:
            for layout in ("half", "interleaved"):
                if rotation_error(x, layout, rotary_dim, start) <= tolerance:
                    layouts.add((layout, rotary_dim, start))
    return layouts


def expected_frequencies(layer: RopeLayer) -> tuple[Tensor, float]:
    """Frequencies (one per rotated pair, in radians per position) and the factor on cos and sin, by cutaway's RoPE."""
    rope = Rope(require(layer.rope), layer.rotary_dim)
    frequencies = rope.select_frequencies(TokenPositions(layer.positions[None].cpu()))
    return frequencies.reshape(-1, frequencies.shape[-1])[0], rope.attention_factor


def rotation_tolerance(ctx: CheckContext) -> float:
    """Tolerance of `rotation_error` for rounding, including the rounding of cos and sin tables in bf16 or fp16."""
    table_error = 2 * torch.finfo(ctx.model.dtype).eps if ctx.model.dtype in LOW_PRECISION_DTYPES else 0.0
    return max(2 * _ROUNDING_TOLERANCE, NOISE_MARGIN * ctx.noise_ratio, table_error)
