"""Training and inference: exposure bias, entropy floor, KL penalty, update ratios, decoding time, bugs and checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from cutaway.learn.studies.study import Estimate, PartFn
from cutaway.learn.studies.training_inference import exposure, preferences
from cutaway.learn.studies.training_inference.bug_checks import measure_bug_checks
from cutaway.learn.studies.training_inference.decoding import measure_decoding

PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    exposure.measure_exposure,
    exposure.measure_entropy_floor,
    exposure.measure_update_ratio,
    preferences.measure_preferences,
    measure_bug_checks,
)
TIMED_PARTS = ("decoding on cpu", "decoding on cuda")


def list_parts(device: str) -> dict[str, PartFn]:
    """All measurements; the time of decoding on the CPU, and on a GPU if `device` is one."""
    parts: dict[str, PartFn] = {
        part.__name__.removeprefix("measure_").replace("_", " "): partial(part, device) for part in PARTS
    }
    return parts | {
        f"decoding on {place}": partial(measure_decoding, place) for place in dict.fromkeys(["cpu", device])
    }


def describe_settings(device: str) -> dict[str, Any]:
    updates, batch_size = preferences.NUM_UPDATES, preferences.BATCH_SIZE
    return {
        "model": "d_model 32, 2 layers, 2 heads, RoPE",
        "seeds": exposure.NUM_SEEDS,
        "pair source": "order 2, 16 symbols, 3 successors of each pair, 1 % noise",
        "topic source": "4 topics, 12 symbols, 3 successors of each symbol and topic, 1 % noise",
        "continuations": f"{exposure.NUM_CONTINUATIONS} of {exposure.NUM_STEPS} tokens per seed",
        "policies": f"{updates} updates of {batch_size} texts of {preferences.NUM_TOKENS} tokens",
        "decoding": f"{device}, one thread on the CPU",
    }
