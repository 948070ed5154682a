"""How the loss's gradient reaches down: in small stacks made for it, and in the model itself."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.lens.analysis import gradient_by_depth
from cutaway.lens.analysis.gradients import PLACEMENTS, relative_gradient_norms
from cutaway.model import build
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, Query

MAX_GRADIENT_TOKENS = 512
"""Tokens of a text through which a gradient is sent: all values on the way are held for it."""

NumLayers = Annotated[int, Field(strict=True, ge=2, le=48)]


class GradientsByPlacement(Query):
    """Fresh stacks with norms before the sublayers and behind them: the gradient at each block, by depth and seed.

    What `lens.analysis.gradient_by_placement` averages, told stack by stack.
    """

    depths: Annotated[tuple[NumLayers, ...], Field(min_length=1, max_length=6)] = (4, 12, 24)
    num_seeds: Annotated[int, Field(strict=True, ge=1, le=10)] = 3
    d_model: Annotated[int, Field(strict=True, ge=16, le=256, multiple_of=16)] = 64
    seq_len: Annotated[int, Field(strict=True, ge=2, le=128)] = 32
    init: Literal["normal", "xavier"] = "xavier"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        depths = tuple(dict.fromkeys(self.depths))
        total, done = len(PLACEMENTS) * len(depths) * self.num_seeds, 0
        found: dict[str, Tensor] = {}
        for depth in depths:
            for name, placement in PLACEMENTS.items():
                deep = build_small_config(self.d_model, depth, self.init)
                deep = deep.replace(decoder=deep.stacks["decoder"].replace(placement=placement))
                rows: list[Tensor] = []
                for seed in range(self.num_seeds):
                    job.report_progress(done, total, f"{depth} blocks, {name}-norm, seed {seed}")
                    rows.append(relative_gradient_norms(build(deep, seed=seed), self.seq_len, seed))
                    done += 1
                found[f"{name}.{depth}"] = torch.stack(rows)
                job.send_partial(
                    QueryResult({"depth": depth, "placement": name}, {"relative_grad_norms": found[f"{name}.{depth}"]})
                )
        facts = {"depths": depths, "placements": list(PLACEMENTS), "first_to_last_ratio": _first_to_last_ratios(found)}
        return QueryResult(facts, found)


def build_small_config(d_model: int, num_layers: int, init: str) -> Config:
    """A plain decoder: LayerNorm, heads of 16, an FFN of four times the width."""
    block = {"attention": {"heads": d_model // 16}, "ffn": {"kind": "mlp"}}
    decoder = {"layers": num_layers, "norm": {"kind": "layernorm"}, "block": block}
    return read_config(
        {"form": "decoder", "vocab_size": 259, "d_model": d_model, "decoder": decoder, "init": {"kind": init}}
    )


def _first_to_last_ratios(grad_norms: dict[str, Tensor]) -> dict[str, float | None]:
    """The first block's gradient as a share of the last one's, averaged as ratios are."""
    means = {name: float(rows[:, 0].log().mean().exp()) for name, rows in grad_norms.items()}
    return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


class GradientsByDepth(InputQuery):
    """The length of the loss's gradient at the model's own stream, by depth, on this text."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if len(self.input.tokens) > MAX_GRADIENT_TOKENS:
            raise InputError(
                f"the text has {len(self.input.tokens):,} tokens, and a gradient is sent through"
                f" {MAX_GRADIENT_TOKENS} at most; shorten it"
            )
        inspector.validate_input(self.input)
        job.report_progress(0, 1, "there and back")
        source: Any = None if self.input.source is None else list(self.input.source)
        with inspector.edited_model(self.input):
            found = gradient_by_depth(inspector.model, list(self.input.tokens), source=source)
        return QueryResult({"sites": list(found.labels[0])}, {"grad_norms": found.values})
