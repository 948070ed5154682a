"""Queries: gradient norms by depth, in small untrained models by norm placement, and in the inspected model."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.learn.studies.norm_placement import NUM_TEXTS, SEQ_LEN, Setting, describe_gradient
from cutaway.lens.analysis import gradient_by_depth
from cutaway.lens.analysis.gradients import InitName, PlacementName, placement_config, relative_gradient_norms
from cutaway.model import build
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, Query, QueryJob, QueryResult

MAX_GRADIENT_TOKENS = 512
"""Maximum number of tokens of a backward pass. It is limited because all activations are stored."""

STUDY_SETTING, STUDY_DEPTH = Setting("pre", "decoder", "gelu", "gpt2"), 24
"""Setting of the study that is quoted beside the gradient norms of the inspected model."""
PLACEMENTS: tuple[PlacementName, ...] = ("pre", "post", "sandwich")


class GradientsByPlacement(Query):
    """Gradient norm after each block of untrained models with pre-norm, post-norm and sandwich norm, by depth and seed.

    Norms are relative to the norm after the last block. The models, texts and seeds are those of the study
    `norm-placement`, whose result over ten seeds is sent first, as a partial result. The values of each depth and
    placement are sent as partial results too.
    """

    depths: Annotated[tuple[Literal[6, 12, 24, 48, 96], ...], Field(min_length=1, max_length=5)] = (6, 12, 24)
    num_seeds: Annotated[int, Field(strict=True, ge=1, le=10)] = 3
    form: Literal["decoder", "encoder"] = "decoder"
    activation: Literal["gelu", "relu"] = "relu"
    init: InitName = "xavier"

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        depths = tuple(dict.fromkeys(self.depths))
        total, done = len(PLACEMENTS) * len(depths) * self.num_seeds, 0
        study = [
            describe_gradient(Setting(placement, self.form, self.activation, self.init), max(depths))
            for placement in PLACEMENTS
        ]
        job.send_partial(QueryResult({"study": study}))  # before the measurement, which takes seconds
        grad_norms: dict[str, Tensor] = {}
        for depth in depths:
            for placement in PLACEMENTS:
                config = placement_config(placement, depth, form=self.form, activation=self.activation, init=self.init)
                rows: list[Tensor] = []
                for seed in range(self.num_seeds):
                    job.report_progress(done, total, f"{depth} blocks, {placement}-norm, seed {seed}")
                    model = build(config, seed=seed)
                    rows.append(relative_gradient_norms(model, SEQ_LEN, seed, num_texts=NUM_TEXTS))
                    done += 1
                grad_norms[f"{placement}.{depth}"] = torch.stack(rows)
                part = {"relative_grad_norms": grad_norms[f"{placement}.{depth}"]}
                job.send_partial(QueryResult({"depth": depth, "placement": placement}, part))
        # the first block's gradient norm relative to the last block's: geometric mean over seeds
        ratios = {name: float(rows[:, 0].log().mean().exp()) for name, rows in grad_norms.items()}
        data = {"depths": depths, "placements": PLACEMENTS, "first_to_last_ratio": ratios, "study": study}
        return QueryResult(data, grad_norms)


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
        study = describe_gradient(STUDY_SETTING, STUDY_DEPTH)
        return QueryResult({"sites": list(gradients.labels[0]), "study": study}, {"grad_norms": gradients.values})
