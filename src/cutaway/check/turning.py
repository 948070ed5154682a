"""How q and k turn from place to place, in a text of one token: there nothing else tells places apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.check.described import config_of, own_layers
from cutaway.check.exam import MARGIN, NARROW, Exam
from cutaway.check.trail import Trails
from cutaway.check.witness import Attention
from cutaway.config import Latent
from cutaway.config import Rope as RopeConfig
from cutaway.model.masks import Places
from cutaway.model.rope import Rope

NEAR = (0, 1, 2, 3, 4, 5, 7, 11)
FAR = (29, 59, 113, 251, 509, 1021, 2039, 4093)
KNOWN, UNKNOWN = 4096, 64
"""How many positions are tried where no limit is known, with a configuration and without."""
SAME = 1e-3
"""Of the largest value: what rounding does not come to."""


@dataclass
class Layer:
    """One attention of a text of one token at some positions, and what its rotation should be."""

    one: Attention
    positions: Tensor
    rope: RopeConfig | None
    latent: bool = False
    loud: float | None = None

    @property
    def width(self) -> int:
        assert self.one.q is not None
        full = self.one.q.shape[-1]
        return full if self.rope is None or self.rope.width is None else min(self.rope.width, full)

    @property
    def where(self) -> str | None:
        return self.one.module or None

    def vectors(self) -> Iterator[tuple[str, Tensor]]:
        """Queries and keys (H, T, D) of the first row."""
        for name, x in (("queries", self.one.q), ("keys", self.one.k)):
            assert x is not None
            yield name, x[0].float()


def rope_of(exam: Exam) -> list[tuple[RopeConfig | None, bool]] | None:
    """Each layer's rotation (None: it has none), and whether its heads are of a latent; None where nothing is known."""
    if exam.target.rope is not None:
        return [(RopeConfig.model_validate({"kind": "rope", **exam.target.rope}), False)]
    config = config_of(exam.target)
    if config is None:
        return None
    found = []
    for layer in own_layers(config):
        rope: Any = layer.position if isinstance(layer.position, RopeConfig) else None
        if rope is not None and isinstance(layer, Latent):
            rope = rope.model_copy(update={"width": layer.d_rope})
        found.append((rope, isinstance(layer, Latent)))
    return found


def layers(exam: Exam, *, beyond: int | None = None) -> list[Layer]:
    """The attentions whose content is the same at all places, with queries and keys that were seen.

    The text stands at near and far positions, where these are taken; `beyond` a length, where that is asked for.
    """
    ropes, target = rope_of(exam), exam.target
    assert target.logits is not None
    limit = target.longest or (UNKNOWN if ropes is None or target.rope is not None else KNOWN)
    places = [place for place in (*NEAR, *FAR) if place < limit]
    if beyond is not None:
        places = [*NEAR, beyond + 5, 2 * beyond + 7]
    if target.placed is None:
        size = min(exam.length, 13) if beyond is None else beyond + 3
        places = list(range(size if size != 9 else 8))  # a source has nine tokens: so they are told apart
    positions = torch.tensor([places], device=target.device)
    tokens = exam.text(1, 1).expand(-1, len(places)).contiguous()
    with torch.no_grad(), Trails(target.module) as seen:
        if target.placed is None:
            target.logits(tokens)
        else:
            target.placed(tokens, positions)
    own = [one for one in seen.attentions if one.scores.shape[-2] == len(places)]
    own = [one for one in own if one.scores.shape[-1] - len(places) in (0, 1)]
    ropes = ropes * len(own) if target.rope is not None and ropes is not None else ropes
    known = ropes if ropes is not None and len(ropes) == len(own) else [(None, False)] * len(own)
    scaled = [each for each in seen.scaled if each.square and each.module in {one.module for one in own}]
    loud = [each.loud for each in scaled] if len(scaled) == len(own) else [None] * len(own)
    return [
        Layer(one, positions[0], rope, latent, voice)
        for one, (rope, latent), voice in zip(own, known, loud, strict=True)
        if one.q is not None and one.k is not None and steady(one)
    ]


def steady(one: Attention) -> bool:
    """Whether the values are the same at all places, so that queries and keys were before they were turned."""
    return one.v is not None and moved(one.v[0].float()) < SAME


def moved(x: Tensor) -> float:
    """How far (…, T, D) is at any place from the first, as a share of its size."""
    return float((x - x[..., :1, :]).abs().max()) / max(float(x.abs().max()), 1e-30)


def pairs(x: Tensor, layout: str, width: int, start: int) -> Tensor:
    """The pairs of a head's dimensions as complex numbers (…, T, width / 2)."""
    part = x[..., start : start + width]
    a, b = (part[..., 0::2], part[..., 1::2]) if layout == "interleaved" else part.chunk(2, -1)
    return torch.complex(a.contiguous(), b.contiguous())


def strain(x: Tensor, layout: str, width: int, start: int) -> float:
    """How far these pairs are from keeping their length, and all other dimensions from staying, from place to place."""
    size = max(float(x.abs().max()), 1e-30)
    length = pairs(x, layout, width, start).abs()
    worst = float((length - length[..., :1, :]).abs().max()) / size
    rest = torch.cat((x[..., :start], x[..., start + width :]), -1)
    return max(worst, float((rest - rest[..., :1, :]).abs().max()) / size if rest.numel() else 0.0)


def fitting(x: Tensor, bound: float) -> set[tuple[str, int, int]]:
    """All layouts, widths and first dimensions by which vectors only turn."""
    full = x.shape[-1]
    found = set()
    for width in range(2, full + 1, 2):
        for start in {0, full - width}:
            for layout in ("half", "interleaved"):
                if strain(x, layout, width, start) <= bound:
                    found.add((layout, width, start))
    return found


def frequencies(layer: Layer) -> tuple[Tensor, float]:
    """The frequency of each pair and the factor of cos and sin, by the formula."""
    assert layer.rope is not None
    rope = Rope(layer.rope, layer.width)
    frequency = rope.frequencies(Places(layer.positions[None].cpu()))
    return frequency.reshape(-1, frequency.shape[-1])[0], rope.magnitude


def bound_of(exam: Exam) -> float:
    """What rounding may come to, also that of tables of cosines in a narrow type."""
    narrow = 2 * torch.finfo(exam.target.dtype).eps if exam.target.dtype in NARROW else 0.0
    return max(2 * SAME, MARGIN * exam.ratio, narrow)
