"""How fast a run goes, and how full memory is: what a step computes beside what the device could compute at most."""

import sys
from dataclasses import dataclass

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.size.calibration import recorded
from cutaway.size.hardware import Hardware, hardware
from cutaway.size.sizing import size
from cutaway.train.recipe import Masked, Recipe, Seq2Seq


@dataclass(frozen=True)
class Pace:
    """The FLOPs of a step and the peak of all devices; None where nobody knows."""

    device: torch.device
    flops: float | None
    peak: float | None

    @classmethod
    def of(cls, recipe: Recipe, config: Config, device: torch.device, devices: int = 1) -> "Pace":
        """For so many devices alike that share a step."""
        flops, peak = flops_of_step(recipe, config), peak_of(device, recipe.training.precision)
        return cls(device, flops, None if peak is None else devices * peak)

    def told(self, seconds: float) -> dict[str, float]:
        """The share of the peak, and the most bytes that were in use; each if it is known."""
        told: dict[str, float] = {}
        if self.flops is not None and self.peak is not None:
            told["peak_share"] = self.flops / self.peak / max(1e-9, seconds)
        used = memory_used(self.device)
        return told if used is None else told | {"memory": used}


def flops_of_step(recipe: Recipe, config: Config) -> float | None:
    """There and back, over the pairs that see each other; nothing that is computed twice counts twice.

    Pairs of texts are of any length, so nobody knows beforehand what they take.
    """
    if isinstance(recipe.objective, Seq2Seq):
        return None
    parts = dict(size(config, mode="train", context=recipe.data.length).train_flops["none"].seen)
    if isinstance(recipe.objective, Masked):  # the head is asked for what is hidden only
        parts["head"] = round(recipe.objective.rate * parts["head"])
    return float(recipe.training.batch * sum(parts.values()))


def peak_of(device: torch.device, precision: str) -> float | None:
    """Operations a second: as published for a GPU, as `cutaway bench` measured for anything else."""
    dtype = precision
    if device.type == "cuda" and precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    try:
        return known(device).rate(dtype)
    except InputError:  # not in the table, or without a rate in this dtype
        pass
    measured = measured_on(device)
    return None if measured is None else measured.get(dtype)


def known(device: torch.device) -> Hardware:
    """A CPU's name says nothing of how many of its cores are ours."""
    if device.type != "cuda":
        raise InputError(f"{device} is in no table; run `cutaway bench`")
    return hardware(torch.cuda.get_device_name(device))


def measured_on(device: torch.device) -> dict[str, float] | None:
    """The rates that were measured, if they are this device's."""
    try:
        found = recorded()
    except InputError:  # damaged; `cutaway size --hardware here` says so
        return None
    if found is None:
        return None
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found.flops if here == (found.kind if device.type == "cpu" else found.device) else None


def memory_used(device: torch.device) -> int | None:
    """The most that was allocated on a GPU, or that this process had in memory; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
