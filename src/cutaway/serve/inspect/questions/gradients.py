"""How the loss's gradient reaches down: in small stacks made for it, and in the model itself."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.lens.readings import gradient_by_depth
from cutaway.lens.readings.depth import PLACEMENTS, shares
from cutaway.model import build
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.question import OfText, Question
from cutaway.serve.inspect.wire import Answer

LONGEST = 512
"""Tokens of a text through which a gradient is sent: all values on the way are held for it."""

Depth = Annotated[int, Field(strict=True, ge=2, le=48)]


class Placements(Question):
    """Fresh stacks with norms before the sublayers and behind them: the gradient at each block, by depth and seed.

    What `lens.readings.gradient_by_placement` averages, told stack by stack.
    """

    depths: Annotated[tuple[Depth, ...], Field(min_length=1, max_length=6)] = (4, 12, 24)
    seeds: Annotated[int, Field(strict=True, ge=1, le=10)] = 3
    d_model: Annotated[int, Field(strict=True, ge=16, le=256, multiple_of=16)] = 64
    length: Annotated[int, Field(strict=True, ge=2, le=128)] = 32
    init: Literal["normal", "xavier"] = "xavier"

    def answer(self, of: Inspector, job: Job) -> Answer:
        depths = tuple(dict.fromkeys(self.depths))
        total, done = len(PLACEMENTS) * len(depths) * self.seeds, 0
        found: dict[str, Tensor] = {}
        for depth in depths:
            for name, placement in PLACEMENTS.items():
                deep = small(self.d_model, depth, self.init)
                deep = deep.replace(decoder=deep.stacks["decoder"].replace(placement=placement))
                rows: list[Tensor] = []
                for seed in range(self.seeds):
                    job.progress(done, total, f"{depth} blocks, {name}-norm, seed {seed}")
                    rows.append(shares(build(deep, seed=seed), self.length, seed))
                    done += 1
                found[f"{name}.{depth}"] = torch.stack(rows)
                job.part(Answer({"depth": depth, "placement": name}, {"shares": found[f"{name}.{depth}"]}))
        facts = {"depths": depths, "placements": list(PLACEMENTS), "first": firsts(found)}
        return Answer(facts, found)


def small(d_model: int, layers: int, init: str) -> Config:
    """A plain decoder: LayerNorm, heads of 16, an FFN of four times the width."""
    block = {"attention": {"heads": d_model // 16}, "ffn": {"kind": "mlp"}}
    decoder = {"layers": layers, "norm": {"kind": "layernorm"}, "block": block}
    return read_config(
        {"form": "decoder", "vocab_size": 259, "d_model": d_model, "decoder": decoder, "init": {"kind": init}}
    )


def firsts(found: dict[str, Tensor]) -> dict[str, float | None]:
    """The first block's gradient as a share of the last one's, averaged as ratios are."""
    means = {name: float(rows[:, 0].log().mean().exp()) for name, rows in found.items()}
    return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


class Slope(OfText):
    """The length of the loss's gradient at the model's own stream, by depth, on this text."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        if len(self.look.tokens) > LONGEST:
            raise InputError(
                f"the text has {len(self.look.tokens):,} tokens, and a gradient is sent through {LONGEST} at most; "
                "shorten it"
            )
        of.refuse(self.look)
        job.progress(0, 1, "there and back")
        source: Any = None if self.look.source is None else list(self.look.source)
        with of.changed(self.look):
            found = gradient_by_depth(of.model, list(self.look.tokens), source=source)
        return Answer({"points": list(found.labels[0])}, {"lengths": found.values})
