"""Roofline model: time ≥ max(FLOPs / peak FLOPS, bytes / bandwidth), for prefill, decode and training steps."""

from collections.abc import Callable
from dataclasses import dataclass

from cutaway.config.transformer import Config
from cutaway.errors import InputError
from cutaway.size.engine_kernels import ENGINE_EFFICIENCY, ENGINE_KERNELS_PER_LAYER, ENGINE_LAUNCH_SECONDS
from cutaway.size.hardware import Hardware
from cutaway.size.precision import Precision
from cutaway.size.state_dict_shapes import list_tensors

_COMPILED_LAUNCH_SECONDS, _EAGER_LAUNCH_SECONDS = 4e-6, 40e-6
"""Launch overhead per operation: in a compiled graph, and in eager mode on a slow CPU. The overhead dominates for small
models and small batches."""

_MAX_BATCH_SIZE = 2**20


@dataclass(frozen=True)
class EfficiencyRange:
    """Fraction of the roofline bound that optimized (`high`) and simple (`low`) implementations reach."""

    high: float
    low: float
    source: str = "range from simple to optimized implementations on data-center GPUs"


DEFAULT_EFFICIENCY = {
    "prefill": EfficiencyRange(0.85, 0.3),
    "decode": EfficiencyRange(0.92, 0.35),
    "train": EfficiencyRange(0.7, 0.15),
}


@dataclass(frozen=True)
class Workload:
    """FLOPs and memory traffic of a pass on one device."""

    name: str
    flops: int
    """Minimum FLOPs: attention over visible pairs only."""
    min_bytes: int
    """Minimum number of bytes read and written."""
    num_tokens: int
    """Number of tokens processed, summed over all devices."""
    num_kernel_launches: int
    expected_bytes: int
    """Number of bytes read and written, with the expected number of distinct experts under uniform routing."""
    float8_flops: int = 0
    """FLOPs in fp8 among `flops` (float8 training)."""


@dataclass(frozen=True)
class RooflineBound:
    """Lower bound of the time of a pass on a device (`min_seconds`), and the expected range of the time."""

    name: str
    compute_seconds: float
    bandwidth_seconds: float
    ridge_point: float
    """Arithmetic intensity (FLOPs per byte) above which the device is compute-bound."""
    arithmetic_intensity: float
    num_tokens: int
    expected_seconds_low: float
    expected_seconds_high: float
    """The expected range from optimized to simple implementations, without Python overhead (compiled or CUDA graph)."""
    eager_seconds_high: float
    """Upper end of the expected range in eager mode."""
    efficiency: EfficiencyRange
    engine_seconds: tuple[float, float] | None = None
    """Range of the time in the engine of cutaway on a GPU; None if the model does not run in its kernels there."""

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
    peak_flops = _peak_flops(workload, hardware, precision)
    compute, bandwidth = workload.flops / peak_flops, workload.min_bytes / hardware.bandwidth
    expected = max(compute, workload.expected_bytes / hardware.bandwidth)
    slow = expected / efficiency.low
    return RooflineBound(
        name=workload.name,
        compute_seconds=compute,
        bandwidth_seconds=bandwidth,
        ridge_point=peak_flops / hardware.bandwidth,
        arithmetic_intensity=workload.flops / workload.min_bytes,
        num_tokens=workload.num_tokens,
        expected_seconds_low=expected / efficiency.high,
        expected_seconds_high=slow + workload.num_kernel_launches * _COMPILED_LAUNCH_SECONDS,
        eager_seconds_high=slow + workload.num_kernel_launches * _EAGER_LAUNCH_SECONDS,
        efficiency=efficiency,
    )


def _peak_flops(workload: Workload, hardware: Hardware, precision: Precision) -> float:
    """Peak FLOPS of a workload. With fp8 products, it is the harmonic mean of two rates, weighted by their FLOPs."""
    peak_flops = hardware.peak_flops(precision.rate_dtype)
    if not workload.float8_flops:
        return peak_flops
    if "fp8" not in hardware.flops:
        raise InputError(
            f"dtype {precision.name} needs fp8 matmuls, for which {hardware.title} has no peak rate; use dtype mixed,"
            " or a device with fp8 matmuls"
        )
    other_flops = workload.flops - workload.float8_flops
    return workload.flops / (other_flops / peak_flops + workload.float8_flops / hardware.flops["fp8"])


def engine_seconds(
    workload: Workload, hardware: Hardware, precision: Precision, num_layers: int
) -> tuple[float, float]:
    """Range of the time of a prefill or decode pass in the engine's kernels on a GPU."""
    high, low = ENGINE_EFFICIENCY[workload.name]
    compute = workload.flops / hardware.peak_flops(precision.rate_dtype)
    expected = max(compute, workload.expected_bytes / hardware.bandwidth)
    return expected / high, expected / low + num_layers * ENGINE_KERNELS_PER_LAYER * ENGINE_LAUNCH_SECONDS


def weight_bytes_read(config: Config, precision: Precision, num_tokens: int, *, is_decode: bool, expected: bool) -> int:
    """Number of bytes of weights that a pass over `num_tokens` tokens reads.

    Only the rows of an embedding table that are looked up are counted. Of the MoE experts, top_k are counted (the
    minimum), or, with `expected`, the expected number of distinct experts under uniform routing. A decode step reads no
    weights for which `_is_encoder_side` holds. In int8 and int4, the output matrix is quantized too, as with
    `weight_bits`; in memory there is also its unquantized copy.
    """
    total = 0.0
    for tensor in list_tensors(config):
        if is_decode and len(config.stacks) == 2 and _is_encoder_side(tensor.name):
            continue
        nbytes = tensor.nbytes(precision)
        if tensor.is_output_matrix and precision.name in ("int8", "int4"):
            nbytes = precision.tensor_bytes(tensor.shape, "layer")
        if tensor.is_lookup_table:
            nbytes = nbytes * min(num_tokens, tensor.shape[0]) // tensor.shape[0]
        if tensor.expert_routing is not None:
            top_k, experts = tensor.expert_routing
            total += nbytes * (1 - (1 - top_k / experts) ** num_tokens if expected else top_k / experts)
        else:
            total += nbytes
    return int(total)


def _is_encoder_side(name: str) -> bool:
    """Whether a weight is used once per source sequence and not in each decode step.

    This holds for the encoder and for the key and value projections of cross-attention."""
    return name.startswith(("encoder", "source_tokens")) or ".cross.k" in name or ".cross.v" in name


def find_compute_bound_batch_size(workload_at: Callable[[int], Workload], ridge_point: float) -> int | None:
    """Smallest batch size at which decode is compute-bound; None if it is bandwidth-bound up to a batch size of 2²⁰.

    Decode can stay bandwidth-bound because each sequence adds reads of its own cache. Of the MoE experts, the expected
    number of distinct experts is read."""
    low, high = 0, 1
    while (workload := workload_at(high)).flops < ridge_point * workload.expected_bytes:
        low, high = high, 2 * high
        if high > _MAX_BATCH_SIZE:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        workload = workload_at(middle)
        low, high = (middle, high) if workload.flops < ridge_point * workload.expected_bytes else (low, middle)
    return high
