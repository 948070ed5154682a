"""How fast a run goes, and how full memory is: what a step computes beside what the device could compute at most."""

import sys
from dataclasses import dataclass

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.size.estimate import size
from cutaway.size.hardware import Hardware, get_hardware
from cutaway.size.measured_hardware import load_measured_hardware
from cutaway.train.recipe.schema import MaskedLMConfig, Recipe, Seq2SeqConfig


@dataclass(frozen=True)
class Throughput:
    """The FLOPs of a step and the peak of all devices; None where nobody knows."""

    device: torch.device
    step_flops: float | None
    peak_flops_per_second: float | None

    @classmethod
    def from_recipe(cls, recipe: Recipe, config: Config, device: torch.device, num_devices: int = 1) -> "Throughput":
        """For so many devices alike that share a step."""
        flops, peak = flops_per_step(recipe, config), peak_flops_per_second(device, recipe.training.precision)
        return cls(device, flops, None if peak is None else num_devices * peak)

    def measure(self, seconds: float) -> dict[str, float]:
        """The share of the peak, and the most bytes that were in use; each if it is known."""
        told: dict[str, float] = {}
        if self.step_flops is not None and self.peak_flops_per_second is not None:
            told["mfu"] = self.step_flops / self.peak_flops_per_second / max(1e-9, seconds)
        used = peak_memory_bytes(self.device)
        return told if used is None else told | {"peak_memory_bytes": used}


def flops_per_step(recipe: Recipe, config: Config) -> float | None:
    """There and back, over the pairs that see each other; nothing that is computed twice counts twice.

    Pairs of texts are of any length, so nobody knows beforehand what they take.
    """
    if isinstance(recipe.objective, Seq2SeqConfig):
        return None
    parts = dict(size(config, mode="train", context=recipe.data.seq_len).train_flops["none"].visible)
    if isinstance(recipe.objective, MaskedLMConfig):  # the head is asked for what is hidden only
        parts["head"] = round(recipe.objective.mlm_probability * parts["head"])
    return float(recipe.training.batch_size * sum(parts.values()))


def peak_flops_per_second(device: torch.device, precision: str) -> float | None:
    """Operations a second: as published for a GPU, as `cutaway bench` measured for anything else."""
    dtype = precision
    if device.type == "cuda" and precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    try:
        return _published_hardware(device).peak_flops(dtype)
    except InputError:  # not in the table, or without a rate in this dtype
        pass
    measured = _measured_flops(device)
    return None if measured is None else measured.get(dtype)


def _published_hardware(device: torch.device) -> Hardware:
    """A CPU's name says nothing of how many of its cores are ours."""
    if device.type != "cuda":
        raise InputError(f"{device} is in no table; run `cutaway bench`")
    return get_hardware(torch.cuda.get_device_name(device))


def _measured_flops(device: torch.device) -> dict[str, float] | None:
    """The rates that were measured, if they are this device's."""
    try:
        found = load_measured_hardware()
    except InputError:  # damaged; `cutaway size --gpu local` says so
        return None
    if found is None:
        return None
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found.flops if here == (found.kind if device.type == "cpu" else found.device) else None


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most that was allocated on a GPU, or that this process had in memory; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
