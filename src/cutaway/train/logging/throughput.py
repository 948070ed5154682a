"""Throughput of a run: model FLOPs utilization (MFU) and peak memory."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.size.estimate import size
from cutaway.size.hardware import get_hardware
from cutaway.size.measured_hardware import load_measured_hardware
from cutaway.train.data.record_data import uses_records
from cutaway.train.recipe.schema import MaskedLMConfig, PretrainedModelConfig, Recipe, Seq2SeqConfig, SFTConfig


@dataclass(frozen=True)
class Throughput:
    """Number of FLOPs of a step, and peak FLOP/s of all devices together. Either is None if unknown."""

    device: torch.device
    step_flops: float | None
    peak_flops_per_second: float | None

    @classmethod
    def from_recipe(cls, recipe: Recipe, config: Config, device: torch.device, num_devices: int = 1) -> "Throughput":
        """Throughput of a recipe on `num_devices` equal devices, which share the work of each step."""
        flops, peak = flops_per_step(recipe, config), peak_flops_per_second(device, recipe.training.precision)
        return cls(device, flops, None if peak is None else num_devices * peak)

    def measure(self, seconds: float) -> dict[str, float]:
        """MFU of a step that took `seconds`, and peak memory so far. A value that is unknown is left out."""
        metrics: dict[str, float] = {}
        if self.step_flops is not None and self.peak_flops_per_second is not None:
            metrics["mfu"] = self.step_flops / self.peak_flops_per_second / max(1e-9, seconds)
        peak_memory = peak_memory_bytes(self.device)
        return metrics if peak_memory is None else metrics | {"peak_memory_bytes": peak_memory}


def flops_per_step(recipe: Recipe, config: Config) -> float | None:
    """Number of FLOPs of forward and backward pass of a step. None for seq2seq and records, because lengths vary.

    Attention is counted for visible query-key pairs only. Recomputation by activation checkpointing is not counted.
    """
    is_packed = isinstance(recipe.objective, SFTConfig) and recipe.objective.packing
    if isinstance(recipe.objective, Seq2SeqConfig) or (uses_records(recipe.objective) and not is_packed):
        return None
    options: dict[str, Any] = {"mode": "train", "context": recipe.data.seq_len}
    if isinstance(recipe.model, PretrainedModelConfig):  # frozen weights have no gradients
        options["adapter"] = recipe.model.adapter
    flops = dict(size(config, **options).train_flops["none"].visible)
    if isinstance(recipe.objective, MaskedLMConfig):  # logits are computed for masked tokens only
        flops["head"] = round(recipe.objective.mlm_probability * flops["head"])
    return float(recipe.training.batch_size * sum(flops.values()))


def peak_flops_per_second(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s: published value of a GPU in the hardware table, otherwise the value measured by `cutaway bench`.

    None if there is neither. For float8 it is that of bf16, in which a part of the products is computed, so that the
    MFU can be compared with that of bf16 runs.
    """
    dtype = "bf16" if precision == "float8" else precision
    if device.type == "cuda" and precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        dtype = "tf32"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    if name is not None:  # not for a CPU: its name does not say how many cores the process may use
        with suppress(InputError):  # not in the table, or no entry for this dtype
            return get_hardware(name).peak_flops(dtype)
    measured = None
    with suppress(InputError):  # damaged file; `cutaway size --gpu local` reports it
        measured = load_measured_hardware()
    if measured is None:
        return None
    is_same_device = measured.device == name or (device.type == measured.kind == "cpu")
    return measured.flops.get(dtype) if is_same_device else None


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory allocated on a GPU, or peak resident memory of the process on a CPU. None where it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux
