"""Studies by name: what the claims about a Transformer's parts come to, measured small, in minutes on two cores."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from cutaway.train.ablate.equal import Equal
from cutaway.train.ablate.plan import Asked
from cutaway.train.ablate.results import Comparison, Point, Results, against_first

Column = tuple[str, str]
"""A reading and one of its metrics."""


@dataclass(frozen=True)
class Study:
    """A plan with what is read off it."""

    about: str
    recipe: dict[str, Any]
    variants: tuple[Asked, ...]
    compare: Callable[[Results], list[Comparison]]
    measure: str | None = None
    equal: Equal = "tokens"
    rows: Literal["variants", "readings"] = "variants"
    """What a line of the second table is: a variant, or something that was done to the first one."""
    columns: tuple[Column, ...] = ()
    """Of the second table; where its lines are readings, their metrics alone count."""


def recipe(*, layers: int, d_model: int, length: int, steps: int, batch: int = 8, **stack: Any) -> dict[str, Any]:
    """A small decoder that reads the standard library byte by byte."""
    return {
        "model": {
            "form": "decoder",
            "vocab_size": 259,
            "d_model": d_model,
            "context": length,
            "decoder": {
                "layers": layers,
                "block": {"attention": {"heads": 4, "position": {"kind": "rope"}}, "ffn": {"kind": "gated"}},
                **stack,
            },
        },
        "data": {"length": length},
        "optimiser": {"rate": 3e-3},
        "schedule": {"warmup": max(1, steps // 8)},
        "training": {"steps": steps, "batch": batch},
        "watching": {"every": max(1, steps // 4), "sequences": 64},
        "saving": {"every": max(1, steps // 2)},
    }


# Gradients by depth (claim 1)

DEPTHS = (2, 6, 12)
MIDDLE = 6
"""Where warm-up is left out, too."""


def deep() -> Study:
    small = recipe(layers=2, d_model=64, length=64, steps=80)
    small["model"]["init"] = {"kind": "xavier"}
    asked = [
        Asked(f"{place}, depth {depth}", (("placement", place), ("depth", str(depth))))
        for depth, place in product(DEPTHS, ("pre", "post"))
    ]
    cold = ("depth", str(MIDDLE)), ("schedule.warmup", "0")
    asked += [Asked(f"{place}, depth {MIDDLE}, no warm-up", (("placement", place), *cold)) for place in ("pre", "post")]
    return Study(
        "gradient by depth and loss, with norms before or after each sublayer (Xavier's weights)",
        small,
        tuple(asked),
        compare_depths,
        measure="gradients",
        columns=(("fresh", "first_to_last"), ("trained", "first_to_last")),
    )


def compare_depths(results: Results) -> list[Comparison]:
    asked = []
    for depth in DEPTHS:
        pre, post = f"pre, depth {depth}", f"post, depth {depth}"
        for what in ("fresh", "trained"):
            asked.append(Comparison(Point(post, "first_to_last", what), Point(pre, "first_to_last", what)))
        asked.append(Comparison(Point(post), Point(pre)))
    for place in ("pre", "post"):
        name = f"{place}, depth {MIDDLE}"
        asked.append(Comparison(Point(f"{name}, no warm-up"), Point(name), against="with it"))
    return asked


# Parts taken away (claim 2)

WHOLE = "whole"


def take_away() -> Study:
    return Study(
        "what each part does for trained weights when it is taken away, and for a model trained without it",
        recipe(layers=4, d_model=64, length=64, steps=300),
        (
            Asked(WHOLE),
            Asked("a block fewer", (("depth", "3"),)),
            Asked("no final norm", (("model.decoder.placement.final_norm", "false"),)),
            Asked("FFN first", (), "FFN first"),
            Asked("a head fewer", (("model.decoder.block.attention.d_head", "16"), ("heads", "3"))),
            Asked("no mask", (), "without mask"),
            Asked("no positions", (("position", "none"),)),
        ),
        compare_taken,
        measure="taken away",
        rows="readings",
        columns=(("", "loss"), ("", "top5"), ("", "moved")),
    )


def compare_taken(results: Results) -> list[Comparison]:
    whole = Point(WHOLE, "loss", "as it is")
    asked = [
        Comparison(Point(WHOLE, "loss", what), whole, name=f"trained whole, then {what}", against="left whole")
        for what in results.whats()
        if what not in ("as it is", "with the mask")
    ]
    asked += [
        Comparison(Point(name), Point(WHOLE), name=f"trained with {name}", against="trained whole")
        for name in results.names[1:]
    ]
    leak = Point("no mask", "loss", "with the mask")
    return [*asked, Comparison(leak, whole, name="trained with no mask, then given it", against="trained whole")]


# Positions (claim 3)

METHODS = ("none", "sinusoidal", "learned", "rope", "alibi", "relative-bias")
LENGTH = 64


def places() -> Study:
    small = recipe(layers=3, d_model=64, length=LENGTH, steps=250, embedding={"scale": "sqrt_d_model"})
    small["model"]["init"] = {"kind": "xavier"}  # vectors as long as sinusoids are, which would drown shorter ones
    small["model"]["context"] = 5 * LENGTH  # learned positions have rows for what they are never trained on
    return Study(
        f"what each position method notices, and how it does beyond the {LENGTH} tokens it was trained on",
        small,
        tuple(Asked(method, (("position", method),)) for method in METHODS),
        compare_places,
        measure="positions",
        columns=(
            ("shuffled, no mask", "noticed"),
            ("shuffled, causal mask", "noticed"),
            ("moved by 7 positions", "noticed"),
            ("×1 the length", "loss"),
            ("×2 the length", "by_context"),
            ("×4 the length", "by_context"),
        ),
    )


def compare_places(results: Results) -> list[Comparison]:
    asked = [Comparison(Point(name, "noticed", "shuffled, no mask"), told=True) for name in METHODS]
    asked += against_first(results)
    asked += [
        Comparison(Point(name, "by_context", "×4 the length"), name=f"{name}: reading {4 * LENGTH} tokens at once")
        for name in METHODS
    ]
    return asked


# Parts at equal budget (claim 6)


def parts() -> Study:
    return Study(
        "norms, activations and shared key heads at an equal number of parameters",
        recipe(layers=3, d_model=96, length=128, steps=200, norm={"kind": "rmsnorm"}),
        (
            Asked("RMSNorm+SwiGLU+MHA"),
            Asked("LayerNorm", (("norm", "layernorm"),)),
            Asked("GELU", (("activation", "gelu"),)),
            Asked("ReLU", (("activation", "relu"),)),
            Asked("GQA (2 key heads)", (("kv-heads", "2"),)),
            Asked("MQA (1 key head)", (("kv-heads", "1"),)),
        ),
        compare_parts,
        equal="parameters",
    )


def compare_parts(results: Results) -> list[Comparison]:
    first = results.names[0]
    speeds = [Comparison(Point(name, "step_seconds"), Point(first, "step_seconds")) for name in results.names[1:]]
    return against_first(results) + speeds


STUDIES: dict[str, Callable[[], Study]] = {
    "depth-and-norm": deep,
    "parts": parts,
    "positions": places,
    "take-away": take_away,
}
"""Each is `cutaway ablate NAME`."""
