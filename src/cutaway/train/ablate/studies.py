"""Studies by name: what the claims about a Transformer's parts come to, measured small, in minutes on two cores."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from cutaway.train.ablate.budget import BudgetKind
from cutaway.train.ablate.plan import VariantSpec
from cutaway.train.ablate.results import Comparison, MetricRef, Results, compare_to_first

Column = tuple[str, str]
"""A condition and one of its metrics."""


@dataclass(frozen=True)
class Study:
    """A plan with what is read off it."""

    description: str
    recipe: dict[str, Any]
    variants: tuple[VariantSpec, ...]
    compare: Callable[[Results], list[Comparison]]
    measurement: str | None = None
    match: BudgetKind = "tokens"
    rows: Literal["variants", "measurements"] = "variants"
    """What a line of the second table is: a variant, or something that was done to the first one."""
    columns: tuple[Column, ...] = ()
    """Of the second table; where its lines are measurements, their metrics alone count."""


def small_recipe(
    *, layers: int, d_model: int, seq_len: int, max_steps: int, batch_size: int = 8, **stack: Any
) -> dict[str, Any]:
    """A small decoder that reads the standard library byte by byte."""
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


# Gradients by depth (claim 1)

DEPTHS = (2, 6, 12)
NO_WARMUP_DEPTH = 6
"""Where warm-up is left out, too."""


def depth_and_norm_study() -> Study:
    small = small_recipe(layers=2, d_model=64, seq_len=64, max_steps=80)
    small["model"]["init"] = {"kind": "xavier"}
    asked = [
        VariantSpec(f"{place}, depth {depth}", (("placement", place), ("depth", str(depth))))
        for depth, place in product(DEPTHS, ("pre", "post"))
    ]
    cold = ("depth", str(NO_WARMUP_DEPTH)), ("schedule.warmup_steps", "0")
    asked += [
        VariantSpec(f"{place}, depth {NO_WARMUP_DEPTH}, no warm-up", (("placement", place), *cold))
        for place in ("pre", "post")
    ]
    return Study(
        "gradient by depth and loss, with norms before or after each sublayer (Xavier's weights)",
        small,
        tuple(asked),
        _compare_depths,
        measurement="gradients",
        columns=(("initial", "first_to_last_grad_ratio"), ("trained", "first_to_last_grad_ratio")),
    )


def _compare_depths(results: Results) -> list[Comparison]:
    asked = []
    for depth in DEPTHS:
        pre, post = f"pre, depth {depth}", f"post, depth {depth}"
        for when in ("initial", "trained"):
            ratio = "first_to_last_grad_ratio"
            asked.append(Comparison(MetricRef(post, ratio, when), MetricRef(pre, ratio, when)))
        asked.append(Comparison(MetricRef(post), MetricRef(pre)))
    for place in ("pre", "post"):
        name = f"{place}, depth {NO_WARMUP_DEPTH}"
        asked.append(Comparison(MetricRef(f"{name}, no warm-up"), MetricRef(name), baseline_label="with it"))
    return asked


# Parts taken away (claim 2)

FULL_MODEL = "full model"


def component_removal_study() -> Study:
    return Study(
        "what each part does for trained weights when it is taken away, and for a model trained without it",
        small_recipe(layers=4, d_model=64, seq_len=64, max_steps=300),
        (
            VariantSpec(FULL_MODEL),
            VariantSpec("a block fewer", (("depth", "3"),)),
            VariantSpec("no final norm", (("model.decoder.placement.final_norm", "false"),)),
            VariantSpec("FFN before attention", (), "FFN before attention"),
            VariantSpec("a head fewer", (("model.decoder.block.attention.d_head", "16"), ("heads", "3"))),
            VariantSpec("no mask", (), "no causal mask"),
            VariantSpec("no positions", (("position", "none"),)),
        ),
        _compare_component_removal,
        measurement="component removal",
        rows="measurements",
        columns=(("", "loss"), ("", "top5_accuracy"), ("", "resid_change")),
    )


def _compare_component_removal(results: Results) -> list[Comparison]:
    whole = MetricRef(FULL_MODEL, "loss", "baseline")
    asked = [
        Comparison(
            MetricRef(FULL_MODEL, "loss", what), whole, label=f"trained whole, then {what}", baseline_label="left whole"
        )
        for what in results.conditions()
        if what not in ("baseline", "with the mask")
    ]
    asked += [
        Comparison(MetricRef(name), MetricRef(FULL_MODEL), label=f"trained with {name}", baseline_label="trained whole")
        for name in results.variant_names[1:]
    ]
    leak = MetricRef("no mask", "loss", "with the mask")
    return [
        *asked,
        Comparison(leak, whole, label="trained with no mask, then given it", baseline_label="trained whole"),
    ]


# Positions (claim 3)

POSITION_METHODS = ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias")
SEQ_LEN = 64


def positions_study() -> Study:
    small = small_recipe(layers=3, d_model=64, seq_len=SEQ_LEN, max_steps=250, embedding={"scale": "sqrt_d_model"})
    small["model"]["init"] = {"kind": "xavier"}  # vectors as long as sinusoids are, which would drown shorter ones
    small["model"]["context"] = 5 * SEQ_LEN  # learned positions have rows for what they are never trained on
    return Study(
        f"what each position method notices, and how it does beyond the {SEQ_LEN} tokens it was trained on",
        small,
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
    asked = [
        Comparison(MetricRef(name, "hidden_change", "permuted, no mask"), report_only=True) for name in POSITION_METHODS
    ]
    asked += compare_to_first(results)
    asked += [
        Comparison(
            MetricRef(name, "context_effect", "×4 the length"), label=f"{name}: reading {4 * SEQ_LEN} tokens at once"
        )
        for name in POSITION_METHODS
    ]
    return asked


# Parts at equal budget (claim 6)


def components_study() -> Study:
    return Study(
        "norms, activations and shared key heads at an equal number of parameters",
        small_recipe(layers=3, d_model=96, seq_len=128, max_steps=200, norm={"kind": "rmsnorm"}),
        (
            VariantSpec("RMSNorm+SwiGLU+MHA"),
            VariantSpec("LayerNorm", (("norm", "layernorm"),)),
            VariantSpec("GELU", (("activation", "gelu"),)),
            VariantSpec("ReLU", (("activation", "relu"),)),
            VariantSpec("GQA (2 key heads)", (("kv-heads", "2"),)),
            VariantSpec("MQA (1 key head)", (("kv-heads", "1"),)),
        ),
        _compare_components,
        match="parameters",
    )


def _compare_components(results: Results) -> list[Comparison]:
    first = results.variant_names[0]
    speeds = [
        Comparison(MetricRef(name, "step_seconds"), MetricRef(first, "step_seconds"))
        for name in results.variant_names[1:]
    ]
    return compare_to_first(results) + speeds


STUDIES: dict[str, Callable[[], Study]] = {
    "depth-and-norm": depth_and_norm_study,
    "components": components_study,
    "positions": positions_study,
    "component-removal": component_removal_study,
}
"""Each is `cutaway ablate NAME`."""
