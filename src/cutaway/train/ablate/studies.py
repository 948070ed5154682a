"""Named studies, which test claims about Transformer components on small models. They take minutes on two cores."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from cutaway.train.ablate.budget import BudgetKind
from cutaway.train.ablate.plan import VariantSpec
from cutaway.train.ablate.results import Comparison, MetricRef, Results, compare_to_first
from cutaway.train.recipe.load import Table

Column = tuple[str, str]
"""Name of a measurement condition, and name of a metric."""


@dataclass(frozen=True)
class Study:
    """A predefined ablation: a recipe, its variants, and the comparisons between the variants."""

    description: str
    recipe: Table
    variants: tuple[VariantSpec, ...]
    compare: Callable[[Results], list[Comparison]]
    measurement: str | None = None
    match: BudgetKind = "tokens"
    rows: Literal["variants", "measurements"] = "variants"
    """Rows of the table of measurements: the variants, or the conditions measured on the first variant."""
    columns: tuple[Column, ...] = ()
    """Columns of the table of measurements. If the rows are conditions, only the metric of each column is used."""


def _small_recipe(
    *, layers: int, d_model: int, seq_len: int, max_steps: int, batch_size: int = 8, **stack: Any
) -> Table:
    """Recipe of a small byte-level decoder, trained on Python's standard library."""
    return {
        "model": {
            "form": "decoder",
            "vocab_size": 259,
            "d_model": d_model,
            "context": seq_len,
            "decoder": {
                "layers": layers,
                "block": {"attention": {"heads": 4, "position": {"kind": "rope"}}, "ffn": {"kind": "gated"}},
                **stack,
            },
        },
        "data": {"seq_len": seq_len},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": max(1, max_steps // 8)},
        "training": {"max_steps": max_steps, "batch_size": batch_size},
        "eval": {"interval": max(1, max_steps // 4), "num_sequences": 64},
        "checkpoint": {"interval": max(1, max_steps // 2)},
    }


# Gradients by depth

DEPTHS = (2, 6, 12)
NO_WARMUP_DEPTH = 6
"""Depth at which training with and without warm-up is compared."""


def _depth_and_norm_study() -> Study:
    recipe = _small_recipe(layers=2, d_model=64, seq_len=64, max_steps=80)
    recipe["model"]["init"] = {"kind": "xavier"}
    variants = [
        VariantSpec(f"{placement}, depth {depth}", (("placement", placement), ("depth", str(depth))))
        for depth, placement in product(DEPTHS, ("pre", "post"))
    ]
    no_warmup = ("depth", str(NO_WARMUP_DEPTH)), ("schedule.warmup_steps", "0")
    variants += [
        VariantSpec(f"{placement}, depth {NO_WARMUP_DEPTH}, no warm-up", (("placement", placement), *no_warmup))
        for placement in ("pre", "post")
    ]
    return Study(
        "loss, and gradient norm by depth, with pre-norm or post-norm (Xavier initialization)",
        recipe,
        tuple(variants),
        _compare_depths,
        measurement="gradients",
        columns=(("initial", "first_to_last_grad_ratio"), ("trained", "first_to_last_grad_ratio")),
    )


def _compare_depths(results: Results) -> list[Comparison]:
    comparisons = []
    for depth in DEPTHS:
        pre, post = f"pre, depth {depth}", f"post, depth {depth}"
        for condition in ("initial", "trained"):
            ratio = "first_to_last_grad_ratio"
            comparisons.append(Comparison(MetricRef(post, ratio, condition), MetricRef(pre, ratio, condition)))
        comparisons.append(Comparison(MetricRef(post), MetricRef(pre)))
    for placement in ("pre", "post"):
        name = f"{placement}, depth {NO_WARMUP_DEPTH}"
        comparisons.append(Comparison(MetricRef(f"{name}, no warm-up"), MetricRef(name), baseline_label="with warm-up"))
    return comparisons


# Components removed

FULL_MODEL = "full model"


def component_removal_study() -> Study:
    return Study(
        "effect of removing each component from a trained model, and of training without it",
        _small_recipe(layers=4, d_model=64, seq_len=64, max_steps=300),
        (
            VariantSpec(FULL_MODEL),
            VariantSpec("one block fewer", (("depth", "3"),)),
            VariantSpec("no final norm", (("model.decoder.placement.final_norm", "false"),)),
            VariantSpec("FFN before attention", edits=(("blocks.*", "swap"),)),
            VariantSpec("one head fewer", (("model.decoder.block.attention.d_head", "16"), ("heads", "3"))),
            VariantSpec("no mask", edits=(("mask", "drop"),)),
            VariantSpec("no positions", (("position", "none"),)),
        ),
        _compare_component_removal,
        measurement="component removal",
        rows="measurements",
        columns=(("", "loss"), ("", "top5_accuracy"), ("", "resid_change")),
    )


def _compare_component_removal(results: Results) -> list[Comparison]:
    baseline = MetricRef(FULL_MODEL, "loss", "baseline")
    comparisons = [
        Comparison(
            MetricRef(FULL_MODEL, "loss", condition),
            baseline,
            label=f"{FULL_MODEL}, then {condition}",
            baseline_label=FULL_MODEL,
        )
        for condition in results.conditions()
        if condition not in ("baseline", "with the mask")
    ]
    comparisons += [
        Comparison(MetricRef(name), MetricRef(FULL_MODEL), label=f"trained with {name}", baseline_label=FULL_MODEL)
        for name in results.variant_names[1:]
    ]
    unmasked = MetricRef("no mask", "loss", "with the mask")
    label = "trained with no mask, then with the mask"
    return [*comparisons, Comparison(unmasked, baseline, label=label, baseline_label=FULL_MODEL)]


# Positions

POSITION_METHODS = ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias")
SEQ_LEN = 64


def _positions_study() -> Study:
    recipe = _small_recipe(layers=3, d_model=64, seq_len=SEQ_LEN, max_steps=250, embedding={"scale": "sqrt_d_model"})
    # With this initialization, embeddings have the same norm as sinusoidal positions. Smaller embeddings would be
    # dominated by the positions.
    recipe["model"]["init"] = {"kind": "xavier"}
    recipe["model"]["context"] = 5 * SEQ_LEN  # learned positions need rows beyond the trained length too
    return Study(
        f"sensitivity of each position method to order and offset, and its loss beyond the trained {SEQ_LEN} positions",
        recipe,
        tuple(VariantSpec(method, (("position", method),)) for method in POSITION_METHODS),
        _compare_positions,
        measurement="positions",
        columns=(
            ("permuted, no mask", "hidden_change"),
            ("permuted, causal mask", "hidden_change"),
            ("shifted by 7 positions", "hidden_change"),
            ("×1 the length", "loss"),
            ("×2 the length", "context_effect"),
            ("×4 the length", "context_effect"),
        ),
    )


def _compare_positions(results: Results) -> list[Comparison]:
    comparisons = [
        Comparison(MetricRef(name, "hidden_change", "permuted, no mask"), report_only=True) for name in POSITION_METHODS
    ]
    comparisons += compare_to_first(results)
    comparisons += [
        Comparison(
            MetricRef(name, "context_effect", "×4 the length"),
            label=f"{name}: a context of {4 * SEQ_LEN} tokens instead of {SEQ_LEN}",
        )
        for name in POSITION_METHODS
    ]
    return comparisons


# Components at equal budget


def _components_study() -> Study:
    return Study(
        "norms, activations and shared key-value heads at an equal number of parameters",
        _small_recipe(layers=3, d_model=96, seq_len=128, max_steps=200, norm={"kind": "rmsnorm"}),
        (
            VariantSpec("RMSNorm+SwiGLU+MHA"),
            VariantSpec("LayerNorm", (("norm", "layernorm"),)),
            VariantSpec("GELU", (("activation", "gelu"),)),
            VariantSpec("ReLU", (("activation", "relu"),)),
            VariantSpec("GQA (2 KV heads)", (("kv-heads", "2"),)),
            VariantSpec("MQA (1 KV head)", (("kv-heads", "1"),)),
        ),
        _compare_components,
        match="parameters",
    )


def _compare_components(results: Results) -> list[Comparison]:
    first = results.variant_names[0]
    step_times = [
        Comparison(MetricRef(name, "step_seconds"), MetricRef(first, "step_seconds"))
        for name in results.variant_names[1:]
    ]
    return compare_to_first(results) + step_times


STUDIES: dict[str, Callable[[], Study]] = {
    "depth-and-norm": _depth_and_norm_study,
    "components": _components_study,
    "positions": _positions_study,
    "component-removal": component_removal_study,
}
"""Function that builds a study, by the name of the study in `cutaway ablate NAME`."""
