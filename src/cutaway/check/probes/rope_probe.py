"""How q and k turn from place to place, in a text of one token: there nothing else tells places apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.check.adapters.declared_config import get_config, self_attention_configs
from cutaway.check.context import CheckContext
from cutaway.check.numerics import LOW_PRECISION_DTYPES, NOISE_MARGIN
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.probes.scale_tracer import ScaleTracer
from cutaway.config import LatentAttention
from cutaway.config import Rope as RopeConfig
from cutaway.model.masks import TokenPositions
from cutaway.model.rope import Rope

NEAR_POSITIONS = (0, 1, 2, 3, 4, 5, 7, 11)
FAR_POSITIONS = (29, 59, 113, 251, 509, 1021, 2039, 4093)
MAX_POSITION_WITH_CONFIG, MAX_POSITION_WITHOUT_CONFIG = 4096, 64
"""How many positions are tried where no limit is known, with a configuration and without."""
ROUNDING_TOLERANCE = 1e-3
"""Of the largest value: what rounding does not come to."""


@dataclass
class RopeLayer:
    """One attention of a text of one token at some positions, and what its rotation should be."""

    attention: AttentionCall
    positions: Tensor
    rope: RopeConfig | None
    is_latent: bool = False
    max_elementwise: float | None = None

    @property
    def rotary_dim(self) -> int:
        assert self.attention.q is not None
        full = self.attention.q.shape[-1]
        return full if self.rope is None or self.rope.rotary_dim is None else min(self.rope.rotary_dim, full)

    @property
    def module_path(self) -> str | None:
        return self.attention.module or None

    def queries_and_keys(self) -> Iterator[tuple[str, Tensor]]:
        """Queries and keys (H, T, D) of the first row."""
        for name, x in (("queries", self.attention.q), ("keys", self.attention.k)):
            assert x is not None
            yield name, x[0].float()


def get_rope_configs(context: CheckContext) -> list[tuple[RopeConfig | None, bool]] | None:
    """Each layer's rotation (None: it has none), and whether its heads are of a latent; None where nothing is known."""
    if context.model.rope is not None:
        return [(RopeConfig.model_validate({"kind": "rope", **context.model.rope}), False)]
    config = get_config(context.model)
    if config is None:
        return None
    found = []
    for layer in self_attention_configs(config):
        rope: Any = layer.position if isinstance(layer.position, RopeConfig) else None
        if rope is not None and isinstance(layer, LatentAttention):
            rope = rope.model_copy(update={"rotary_dim": layer.d_rope})
        found.append((rope, isinstance(layer, LatentAttention)))
    return found


def trace_rope_layers(context: CheckContext, *, beyond_length: int | None = None) -> list[RopeLayer]:
    """The attentions whose content is the same at all places, with queries and keys that were seen.

    The text stands at near and far positions, where these are taken; beyond `beyond_length`, where that is asked for.
    """
    ropes, target = get_rope_configs(context), context.model
    assert target.logits is not None
    limit = target.max_seq_len or (
        MAX_POSITION_WITHOUT_CONFIG if ropes is None or target.rope is not None else MAX_POSITION_WITH_CONFIG
    )
    places = [place for place in (*NEAR_POSITIONS, *FAR_POSITIONS) if place < limit]
    if beyond_length is not None:
        places = [*NEAR_POSITIONS, beyond_length + 5, 2 * beyond_length + 7]
    if target.logits_with_positions is None:
        size = min(context.seq_len, 13) if beyond_length is None else beyond_length + 3
        places = list(range(size if size != 9 else 8))  # a source has nine tokens: so they are told apart
    positions = torch.tensor([places], device=target.device)
    tokens = context.random_tokens(1, 1).expand(-1, len(places)).contiguous()
    with torch.no_grad(), ScaleTracer(target.module) as seen:
        if target.logits_with_positions is None:
            target.logits(tokens)
        else:
            target.logits_with_positions(tokens, positions)
    own = [one for one in seen.attentions if one.scores.shape[-2] == len(places)]
    own = [one for one in own if one.scores.shape[-1] - len(places) in (0, 1)]
    ropes = ropes * len(own) if target.rope is not None and ropes is not None else ropes
    known = ropes if ropes is not None and len(ropes) == len(own) else [(None, False)] * len(own)
    scaled = [each for each in seen.attention_scales if each.is_square and each.module in {one.module for one in own}]
    loud = [each.max_elementwise for each in scaled] if len(scaled) == len(own) else [None] * len(own)
    return [
        RopeLayer(one, positions[0], rope, latent, voice)
        for one, (rope, latent), voice in zip(own, known, loud, strict=True)
        if one.q is not None and one.k is not None and _has_constant_values(one)
    ]


def _has_constant_values(attention: AttentionCall) -> bool:
    """Whether the values are the same at all places, so that queries and keys were before they were turned."""
    return attention.v is not None and max_relative_change(attention.v[0].float()) < ROUNDING_TOLERANCE


def max_relative_change(x: Tensor) -> float:
    """How far (…, T, D) is at any place from the first, as a share of its size."""
    return float((x - x[..., :1, :]).abs().max()) / max(float(x.abs().max()), 1e-30)


def rotary_pairs(x: Tensor, layout: str, rotary_dim: int, start: int) -> Tensor:
    """The pairs of a head's dimensions as complex numbers (…, T, width / 2)."""
    part = x[..., start : start + rotary_dim]
    a, b = (part[..., 0::2], part[..., 1::2]) if layout == "interleaved" else part.chunk(2, -1)
    return torch.complex(a.contiguous(), b.contiguous())


def rotation_error(x: Tensor, layout: str, rotary_dim: int, start: int) -> float:
    """How far these pairs are from keeping their length, and all other dimensions from staying, from place to place."""
    size = max(float(x.abs().max()), 1e-30)
    length = rotary_pairs(x, layout, rotary_dim, start).abs()
    worst = float((length - length[..., :1, :]).abs().max()) / size
    rest = torch.cat((x[..., :start], x[..., start + rotary_dim :]), -1)
    return max(worst, float((rest - rest[..., :1, :]).abs().max()) / size if rest.numel() else 0.0)


def find_rotation_layouts(x: Tensor, tolerance: float) -> set[tuple[str, int, int]]:
    """All layouts, widths and first dimensions by which vectors only turn."""
    full = x.shape[-1]
    found = set()
    for width in range(2, full + 1, 2):
        for start in {0, full - width}:
            for layout in ("half", "interleaved"):
                if rotation_error(x, layout, width, start) <= tolerance:
                    found.add((layout, width, start))
    return found


def expected_frequencies(layer: RopeLayer) -> tuple[Tensor, float]:
    """The frequency of each pair and the factor of cos and sin, by the formula."""
    assert layer.rope is not None
    rope = Rope(layer.rope, layer.rotary_dim)
    frequency = rope.select_frequencies(TokenPositions(layer.positions[None].cpu()))
    return frequency.reshape(-1, frequency.shape[-1])[0], rope.attention_factor


def rotation_tolerance(context: CheckContext) -> float:
    """What rounding may come to, also that of tables of cosines in a narrow type."""
    narrow = 2 * torch.finfo(context.model.dtype).eps if context.model.dtype in LOW_PRECISION_DTYPES else 0.0
    return max(2 * ROUNDING_TOLERANCE, NOISE_MARGIN * context.noise_ratio, narrow)
