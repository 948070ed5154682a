"""Queries: small models that were trained with another norm, norm placement or position method."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from cutaway.errors import InputError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.load import load
from cutaway.generate.api import generate
from cutaway.pretrained import VARIANTS_DIR
from cutaway.serve.inspect.interval_conclusions import (
    SMALL_DIFFERENCE,
    conclude_beyond_training_length,
    conclude_variant_difference,
)
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult, interval_bounds

BASE = "base"
NUM_NEW_TOKENS = 24
MAX_PROMPT_TOKENS = 128


class Variant(NamedTuple):
    """A value of a component, and the model that was trained with it."""

    component: str
    label: str
    name: str
    explanation: str
    """What differs from the base model and why this matters. The losses are from the results."""


VARIANTS = (
    Variant("Norm", "RMSNorm", BASE, ""),
    Variant(
        "Norm",
        "LayerNorm",
        "layernorm",
        "LayerNorm also subtracts the mean and adds a bias; RMSNorm only divides by the root mean square. Both keep the"
        " inputs of the sublayers at one scale, so that the losses differ by little.",
    ),
    Variant("Norm placement", "pre-norm", BASE, ""),
    Variant(
        "Norm placement",
        "post-norm",
        "post-norm",
        "With post-norm, every block normalizes the residual stream itself, and gradients pass through all norms. With"
        " 4 blocks and a learning rate warmup this trains well; the screen Training compares deeper models.",
    ),
    Variant("Positions", "RoPE", BASE, ""),
    Variant(
        "Positions",
        "learned",
        "learned",
        "One learned vector per position is added to the embedding. The vectors of positions beyond the training length"
        " were never trained, so that the loss rises there.",
    ),
    Variant(
        "Positions",
        "sinusoidal",
        "sinusoidal",
        "Sines and cosines of the position are added to the embedding. They exist for every position, but the model has"
        " not been trained with those beyond the training length.",
    ),
    Variant(
        "Positions",
        "ALiBi",
        "alibi",
        "Attention scores decrease linearly with the distance between query and key, with a slope per head. Distant"
        " keys have almost no weight, so that longer texts look like those of the training.",
    ),
    Variant(
        "Positions",
        "none",
        "no-positions",
        "Without positions, attention cannot tell the order of earlier tokens directly. The causal mask still makes the"
        " positions differ: a token attends to as many tokens as precede it, and the model can learn to use this.",
    ),
)


class TrainedVariants(Query):
    """The variants with their losses on held-out stories, confidence intervals over seeds, and conclusions."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        results = load_variant_results()
        losses = results["variants"]
        variants = []
        for variant in VARIANTS:
            own, base = losses[variant.name], losses[BASE]
            by_position = zip(*own["loss_by_position"], strict=True)
            difference = _difference(own["loss"], base["loss"])
            beyond = conclude_beyond_training_length(
                _difference(own["loss_beyond"], own["loss"]), _difference(own["loss_beyond"], base["loss_beyond"])
            )
            variants.append(
                {
                    **variant._asdict(),
                    **conclude_variant_difference(difference)._asdict(),
                    "loss": interval_bounds(own["loss"]),
                    "loss_beyond": interval_bounds(own["loss_beyond"]),
                    "conclusion_beyond": beyond,
                    "difference": difference,
                    "loss_by_position": [sum(seeds) / len(seeds) for seeds in by_position],
                }
            )
        bucket = results["bucket"]
        ends = range(0, bucket * (len(losses[BASE]["loss_by_position"][0]) + 1), bucket)
        return QueryResult(
            {
                "variants": variants,
                "positions": [(start + end) / 2 for start, end in pairwise(ends)],
                "small_difference": SMALL_DIFFERENCE,
                "num_seeds": len(losses[BASE]["loss"]),
                **{name: results[name] for name in ("seq_len", "num_sequences", "max_steps", "tokens")},
            }
        )


def _difference(losses: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Interval of the difference of two losses of the same seeds."""
    return interval_bounds([loss - other for loss, other in zip(losses, others, strict=True)])


class VariantContinuation(Query):
    """Greedy continuation of a text by the base model or a variant."""

    name: Annotated[str, Field(max_length=40)]
    text: Annotated[str, Field(max_length=4000)]

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if self.name not in {variant.name for variant in VARIANTS}:
            names = ", ".join(dict.fromkeys(variant.name for variant in VARIANTS))
            raise InputError(f"'{self.name}' is not a trained variant; choose one of {names}")
        checkpoint = _load_variant(self.name)
        assert checkpoint.tokenizer is not None
        prompt = checkpoint.tokenizer.encode(self.text)[-MAX_PROMPT_TOKENS:]
        if not prompt:
            raise InputError("the text is empty; write at least one word")
        [completion] = generate(checkpoint, prompt, max_new_tokens=NUM_NEW_TOKENS, temperature=0)
        return QueryResult({"continuation": completion.text})


@cache
def load_variant_results() -> dict[str, Any]:
    """Losses of every variant and seed, by position, which examples/tiny-english/evaluate_variants.py has measured."""
    return json.loads((VARIANTS_DIR / "results.json").read_text(encoding="utf-8"))


@cache
def _load_variant(name: str) -> Checkpoint:
    return load(VARIANTS_DIR / name, device="cpu", dtype=torch.float32)
