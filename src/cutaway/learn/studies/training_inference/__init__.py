"""Training and inference: exposure bias, entropy floor, KL penalty, update ratios, decoding time, bugs and checks."""

from collections.abc import Callable
from typing import Any

import torch

from cutaway.learn.studies.study import Estimate, ProgressFn
from cutaway.learn.studies.training_inference import exposure, preferences
from cutaway.learn.studies.training_inference.bug_checks import measure_bug_checks
from cutaway.learn.studies.training_inference.decoding import measure_decoding

PARTS: tuple[Callable[[str], dict[str, Estimate]], ...] = (
    exposure.measure_exposure,
    exposure.measure_entropy_floor,
    exposure.measure_update_ratio,
    preferences.measure_preferences,
    measure_bug_checks,
    measure_decoding,
)


def run(progress: ProgressFn) -> tuple[dict[str, Any], dict[str, Estimate]]:
    """Run all measurements, on a GPU if there is one; the time of decoding on both devices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = [(part, device) for part in PARTS] + ([(measure_decoding, "cpu")] if device == "cuda" else [])
    estimates: dict[str, Estimate] = {}
    for index, (part, part_device) in enumerate(runs):
        name = part.__name__.removeprefix("measure_").replace("_", " ")
        progress(index, len(runs), f"{name} on {part_device}")
        estimates |= part(part_device)
    updates, batch_size = preferences.NUM_UPDATES, preferences.BATCH_SIZE
    return {
        "model": "d_model 32, 2 layers, 2 heads, RoPE",
        "seeds": exposure.NUM_SEEDS,
        "pair source": "order 2, 16 symbols, 3 successors of each pair, 1 % noise",
        "topic source": "4 topics, 12 symbols, 3 successors of each symbol and topic, 1 % noise",
        "continuations": f"{exposure.NUM_CONTINUATIONS} of {exposure.NUM_STEPS} tokens per seed",
        "policies": f"{updates} updates of {batch_size} texts of {preferences.NUM_TOKENS} tokens",
        "decoding": f"{device}, one thread on the CPU",
    }, estimates
