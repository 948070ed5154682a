"""Queries: gradient norms by depth, in small untrained models (pre-norm and post-norm) and in the inspected model."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.lens.analysis import gradient_by_depth
from cutaway.lens.analysis.gradients import PLACEMENTS, relative_gradient_norms
from cutaway.model import build
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, Query, QueryJob, QueryResult

MAX_GRADIENT_TOKENS = 512
"""Maximum number of tokens of a backward pass. It is limited because all activations are stored."""

NumLayers = Annotated[int, Field(strict=True, ge=2, le=48)]


class GradientsByPlacement(Query):
    """Gradient norm after each block of untrained pre-norm and post-norm models, by depth and seed.

    Norms are relative to the norm after the last block. `lens.analysis.gradient_by_placement` averages the same values.
    Here, the values of each depth and placement are sent as a partial result.
    """

    depths: Annotated[tuple[NumLayers, ...], Field(min_length=1, max_length=6)] = (4, 12, 24)
    num_seeds: Annotated[int, Field(strict=True, ge=1, le=10)] = 3
    d_model: Annotated[int, Field(strict=True, ge=16, le=256, multiple_of=16)] = 64
    seq_len: Annotated[int, Field(strict=True, ge=2, le=128)] = 32
    init: Literal["normal", "xavier"] = "xavier"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        depths = tuple(dict.fromkeys(self.depths))
        total, done = len(PLACEMENTS) * len(depths) * self.num_seeds, 0
        grad_norms: dict[str, Tensor] = {}
        for depth in depths:
            for name, placement in PLACEMENTS.items():
                config = build_small_config(self.d_model, depth, self.init)
                config = config.replace(decoder=config.stacks["decoder"].replace(placement=placement))
                rows: list[Tensor] = []
                for seed in range(self.num_seeds):
                    job.report_progress(done, total, f"{depth} blocks, {name}-norm, seed {seed}")
                    rows.append(relative_gradient_norms(build(config, seed=seed), self.seq_len, seed))
                    done += 1
                grad_norms[f"{name}.{depth}"] = torch.stack(rows)
                part = {"relative_grad_norms": grad_norms[f"{name}.{depth}"]}
                job.send_partial(QueryResult({"depth": depth, "placement": name}, part))
        # the first block's gradient norm relative to the last block's: geometric mean over seeds
        ratios = {name: float(rows[:, 0].log().mean().exp()) for name, rows in grad_norms.items()}
        data = {"depths": depths, "placements": list(PLACEMENTS), "first_to_last_ratio": ratios}
        return QueryResult(data, grad_norms)


def build_small_config(d_model: int, num_layers: int, init: str) -> Config:
    """Return the config of a small decoder: LayerNorm, head dimension 16, FFN hidden dimension 4·d_model."""
    block = {"attention": {"heads": d_model // 16}, "ffn": {"kind": "mlp"}}
    decoder = {"layers": num_layers, "norm": {"kind": "layernorm"}, "block": block}
    return read_config(
        {"form": "decoder", "vocab_size": 259, "d_model": d_model, "decoder": decoder, "init": {"kind": init}}
    )


class GradientsByDepth(InputQuery):
    """Norm of the loss gradient with respect to the model's residual stream, by depth."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if len(self.input.tokens) > MAX_GRADIENT_TOKENS:
            limit = f"the backward pass is limited to {MAX_GRADIENT_TOKENS}"
            raise InputError(f"the text has {len(self.input.tokens):,} tokens; {limit}, so shorten it")
        inspector.validate_input(self.input)
        job.report_progress(0, 1, "forward and backward pass")
        source = None if self.input.source is None else list(self.input.source)
        with inspector.edited_model(self.input):
            gradients = gradient_by_depth(inspector.model, list(self.input.tokens), source=source)
        return QueryResult({"sites": list(gradients.labels[0])}, {"grad_norms": gradients.values})
