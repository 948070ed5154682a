"""How fast it can be: a pass takes at least as long as its products take at the device's peak, and at least as long as
the bytes that it must move take at the memory's bandwidth."""

from collections.abc import Callable
from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.size.flops import FlopCounts
from cutaway.size.hardware import Hardware
from cutaway.size.precision import Precision
from cutaway.size.state_dict import list_tensors

COMPILED_LAUNCH_SECONDS, EAGER_LAUNCH_SECONDS = 4e-6, 40e-6
"""Seconds beside its work that an operation takes in a compiled graph, and started one by one from Python on a slow
host: small models and small batches wait for these, not for the device."""

MAX_BATCH_SIZE = 2**20


@dataclass(frozen=True)
class EfficiencyRange:
    """Shares of the bound that implementations reach: the best, and a plain one."""

    high: float
    low: float
    source: str = "what good and plain implementations reach on data-center GPUs"


DEFAULT_EFFICIENCY = {
    "prefill": EfficiencyRange(0.85, 0.3),
    "decode": EfficiencyRange(0.92, 0.35),
    "train": EfficiencyRange(0.7, 0.15),
}


@dataclass(frozen=True)
class Workload:
    """What a pass must do on one device."""

    name: str
    flops: int
    """Over the pairs that see each other: the least."""
    min_bytes: int
    """The least that must be read and written."""
    num_tokens: int
    """Tokens that come out of it, on all devices."""
    num_kernel_launches: int
    expected_bytes: int
    """With as many experts as tokens reach on average."""


@dataclass(frozen=True)
class RooflineBound:
    """Seconds that nothing can beat, and those to expect."""

    name: str
    compute_seconds: float
    bandwidth_seconds: float
    ridge_point: float
    """FLOPs a byte above which the device's arithmetic binds."""
    arithmetic_intensity: float
    num_tokens: int
    expected_seconds_low: float
    expected_seconds_high: float
    """From the best to a plain implementation, without waiting for Python (compiled, or in a CUDA graph)."""
    eager_seconds_high: float
    """At most, when PyTorch starts every operation by itself."""
    efficiency: EfficiencyRange

    @property
    def min_seconds(self) -> float:
        return max(self.compute_seconds, self.bandwidth_seconds)

    @property
    def bottleneck(self) -> str:
        return "compute" if self.compute_seconds >= self.bandwidth_seconds else "bandwidth"

    @property
    def max_tokens_per_second(self) -> float:
        return self.num_tokens / self.min_seconds


def roofline_bound(
    workload: Workload, hardware: Hardware, precision: Precision, efficiency: EfficiencyRange
) -> RooflineBound:
    rate = hardware.peak_flops(precision.name)
    compute, bandwidth = workload.flops / rate, workload.min_bytes / hardware.bandwidth
    likely = max(compute, workload.expected_bytes / hardware.bandwidth)
    plain = likely / efficiency.low
    return RooflineBound(
        name=workload.name,
        compute_seconds=compute,
        bandwidth_seconds=bandwidth,
        ridge_point=rate / hardware.bandwidth,
        arithmetic_intensity=workload.flops / workload.min_bytes,
        num_tokens=workload.num_tokens,
        expected_seconds_low=likely / efficiency.high,
        expected_seconds_high=plain + workload.num_kernel_launches * COMPILED_LAUNCH_SECONDS,
        eager_seconds_high=plain + workload.num_kernel_launches * EAGER_LAUNCH_SECONDS,
        efficiency=efficiency,
    )


def _weight_bytes_read(
    config: Config, precision: Precision, num_tokens: int, *, is_decode: bool = False, expected: bool = False
) -> int:
    """Bytes of weights that a pass over `num_tokens` tokens reads: looked-up rows only, and of a mixture those experts
    that some token reaches: at least one token's, or as many as tokens that choose freely reach on average."""
    total = 0.0
    for each in list_tensors(config):
        if is_decode and len(config.stacks) == 2 and _is_encoder_side(each.name):
            continue
        size = each.nbytes(precision)
        if each.is_lookup_table:
            size = size * min(num_tokens, each.shape[0]) // each.shape[0]
        if each.expert_routing is not None:
            chosen, experts = each.expert_routing
            total += size * (1 - (1 - chosen / experts) ** num_tokens if expected else chosen / experts)
        else:
            total += size
    return int(total)


def _is_encoder_side(name: str) -> bool:
    """Used once a source, not at each step: the encoder, and the keys and values of cross-attention."""
    return name.startswith(("encoder", "source_tokens")) or ".cross.k" in name or ".cross.v" in name


def decode_workload(
    config: Config,
    precision: Precision,
    flops: FlopCounts,
    *,
    batch_size: int,
    kv_cache_bytes: int,
    logits_bytes: int,
    num_kernel_launches: int,
    dp_size: int,
) -> Workload:
    """One token more of each sequence: all weights and the whole cache are read for it."""
    least, likely = (
        _weight_bytes_read(config, precision, batch_size, is_decode=True, expected=each) for each in (False, True)
    )
    beside = kv_cache_bytes + logits_bytes
    return Workload(
        "decode", flops.total_visible, least + beside, batch_size * dp_size, num_kernel_launches, likely + beside
    )


def prefill_workload(
    config: Config,
    precision: Precision,
    flops: FlopCounts,
    *,
    num_tokens: int,
    kv_cache_bytes: int,
    num_kernel_launches: int,
    dp_size: int,
) -> Workload:
    """Reading prompts: weights once, and the cache is written."""
    least, likely = (_weight_bytes_read(config, precision, num_tokens, expected=each) for each in (False, True))
    return Workload(
        "prefill",
        flops.total_visible,
        least + kv_cache_bytes,
        num_tokens * dp_size,
        num_kernel_launches,
        likely + kv_cache_bytes,
    )


def train_workload(
    flops: FlopCounts,
    *,
    weight_bytes: int,
    grad_bytes: int,
    optimizer_bytes: int,
    num_tokens: int,
    num_kernel_launches: int,
    dp_size: int,
) -> Workload:
    """A step: weights are read there and back, gradients written and read, weights and state read and written."""
    moved = 3 * weight_bytes + 2 * grad_bytes + 2 * optimizer_bytes
    return Workload("train", flops.total_visible, moved, num_tokens * dp_size, num_kernel_launches, moved)


def find_compute_bound_batch_size(workload_at: Callable[[int], Workload], ridge_point: float) -> int | None:
    """The smallest batch at which decoding waits for arithmetic; None if it never does, since every sequence brings a
    cache of its own to read. Of a mixture, the experts count that tokens reach on average."""
    low, high = 0, 1
    while (work := workload_at(high)).flops < ridge_point * work.expected_bytes:
        low, high = high, 2 * high
        if high > MAX_BATCH_SIZE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        work = workload_at(middle)
        low, high = (middle, high) if work.flops < ridge_point * work.expected_bytes else (low, middle)
    return high
