"""`ct.size`: parameter counts, FLOPs, memory and time of a configuration, and their conversion to JSON."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from cutaway.config import config as read_config
from cutaway.config.ffn import Moe
from cutaway.config.lora import LoRA
from cutaway.config.positions import Disentangled
from cutaway.config.transformer import Config, Encoder
from cutaway.errors import InputError
from cutaway.size.adapters import QUANTIZATIONS, read_adapter
from cutaway.size.engine_kernels import MAX_DECODE_ROWS, has_engine_decode, has_engine_prefill
from cutaway.size.estimate_json import estimates_to_dict
from cutaway.size.flops import FlopCounts, count_flops
from cutaway.size.hardware import Hardware
from cutaway.size.kv_cache import KVCacheSize, kv_cache_size
from cutaway.size.measured_hardware import expected_efficiency
from cutaway.size.memory import MemoryBreakdown, inference_memory, prefill_chunks, training_memory
from cutaway.size.optimizer_state import OPTIMIZERS
from cutaway.size.options import (
    ACTIVATION_CHECKPOINTING_MODES,
    ATTENTION_KERNELS,
    FALLBACK_CONTEXT,
    LOSS_MODES,
    MAX_DEFAULT_CONTEXT,
    MODE_LABELS,
    SizeOptions,
    check_count,
    check_optional_count,
    resolve_hardware,
)
from cutaway.size.parallel import ParallelDims, resolve_parallel_dims, shard_config
from cutaway.size.parameters import ParameterCounts, count_parameters
from cutaway.size.precision import KV_CACHE_DTYPES, Precision, get_adapter_precision, get_precision
from cutaway.size.roofline import (
    RooflineBound,
    Workload,
    engine_seconds,
    find_compute_bound_batch_size,
    roofline_bound,
    weight_bytes_read,
)
from cutaway.size.shape_pass import ExecutionConfig, PassCost, inference_pass, training_pass
from cutaway.size.shape_pass.attention_kernels import resolve_kernel
from cutaway.size.state_dict_shapes import CheckpointSize, checkpoint_size
from cutaway.size.stored_precision import stored_precision
from cutaway.size.training_budget import TrainingBudget, compute_training_budget
from cutaway.size.unpublished_sizes import check_size_is_published

_cached_inference_pass = lru_cache(maxsize=32)(inference_pass)
"""Cached because estimates that differ only in batch size or device share these passes."""


class SizeEstimate:
    """Parameters, FLOPs, memory and time of one configuration. Each attribute is computed when it is first read."""

    def __init__(self, options: SizeOptions) -> None:
        self.options = options

    # ------------------------------------------------------------------------------------ parameters

    @cached_property
    def parameters(self) -> ParameterCounts:
        """Exact parameter counts by component and layer."""
        return count_parameters(self.options.config)

    @property
    def num_parameters(self) -> int:
        """Total number of parameters; shared parameters count once."""
        return self.parameters.total

    @cached_property
    def checkpoint(self) -> CheckpointSize:
        """Number of tensors, elements and bytes of a checkpoint of the model in the precision of `options`."""
        return checkpoint_size(self.options.config, self.options.precision)

    # ------------------------------------------------------------------------------------ one device's share

    @property
    def on_gpu(self) -> bool:
        device = self.options.hardware
        return device is None or device.kind not in ("cpu", "apple")

    @cached_property
    def rank_config(self) -> Config:
        """The configuration of one tensor-parallel rank."""
        return shard_config(self.options.config, self.options.parallel_dims.tp)

    @property
    def dp_size(self) -> int:
        """Number of devices that the batch is split over."""
        return self.options.parallel_dims.dp_size

    @property
    def batch_size_per_device(self) -> int:
        """Number of sequences per device."""
        return self.options.batch_size // self.dp_size

    def execution_config(self, activation_checkpointing: str = "none") -> ExecutionConfig:
        """Return the dtypes, attention kernel, activation checkpointing and parallelism of the passes.

        With FSDP, weights are all-gathered in the compute dtype (FSDP's mixed-precision policy), so autocast is off."""
        options, precision, dims = self.options, self.options.precision, self.options.parallel_dims
        config = ExecutionConfig(
            precision.unquantized_bytes,
            precision.compute_bytes,
            precision.autocast,
            kernel=options.kernel,
            activation_checkpointing=activation_checkpointing,
            activation_checkpointing_layers=options.activation_checkpointing_layers,
            device="cuda" if self.on_gpu else "cpu",
            resid_in_compute_dtype=options.loss == "chunked" and precision.autocast,
            base=options.frozen_base if options.mode == "train" else None,
            compiled=options.compiled and options.mode == "train",
            float8=precision.float8 and options.mode == "train",
            **asdict(dims),
        )
        if not config.uses_fsdp:
            return config
        sizes = precision.compute_bytes, precision.unquantized_bytes
        return replace(config, weight_itemsize=sizes[0], autocast=False, grad_itemsize=sizes[1])

    @property
    def stores_attention_scores(self) -> bool:
        """Whether a layer uses the explicit kernel: it was selected, or it is that of 'auto' with soft-cap or sinks."""
        execution = replace(self.execution_config(), grad=self.options.mode == "train")
        return any(
            resolve_kernel(
                execution,
                softcap=getattr(block.attention, "softcap", None) is not None,
                sink=getattr(block.attention, "sink", False),
                has_position_scores=isinstance(block.attention.position, Disentangled),
            )
            == "explicit"
            for stack in self.options.config.stacks.values()
            for block in stack.blocks
        )

    # ------------------------------------------------------------------------------------ FLOPs

    @cached_property
    def prefill_pass(self) -> PassCost:
        """Cost of the forward pass over one sequence of `context` tokens, on one device."""
        return _cached_inference_pass(
            self.rank_config, 1, self.options.context, self.execution_config(), source_len=self.options.source_len
        )

    @cached_property
    def decode_pass(self) -> PassCost:
        """Cost of the decode step that extends one sequence to `context` tokens, on one device."""
        lengths = {"source_len": self.options.source_len, "num_cached_tokens": self.options.context - 1}
        return _cached_inference_pass(self.rank_config, 1, 1, self.execution_config(), source_cached=True, **lengths)

    @cached_property
    def train_pass(self) -> PassCost:
        """Cost of the forward and backward pass of one training step over the sequences of one device."""
        options = self.options
        return training_pass(
            self.rank_config,
            self.batch_size_per_device,
            options.context,
            self.execution_config(options.activation_checkpointing),
            source_len=options.source_len,
            loss=options.loss,
            packed=options.packed,
        )

    @cached_property
    def unsharded(self) -> "SizeEstimate":
        """The same estimate without tensor parallelism."""
        options = self.options
        if options.parallel_dims.tp == 1:
            return self
        dims = replace(options.parallel_dims, tp=1)
        return SizeEstimate(replace(options, world_size=dims.dp_size, parallel="dp", parallel_dims=dims))

    @cached_property
    def forward_flops(self) -> FlopCounts:
        """FLOPs of the unsharded model in the forward pass over one sequence of `context` tokens."""
        return count_flops(self.unsharded.prefill_pass.counter, self.options.context)

    @cached_property
    def decode_flops(self) -> FlopCounts | None:
        """FLOPs of the unsharded model in the decode step that extends one sequence to `context` tokens.

        None for an encoder."""
        return None if isinstance(self.options.config, Encoder) else count_flops(self.unsharded.decode_pass.counter, 1)

    @cached_property
    def train_flops(self) -> dict[str, FlopCounts]:
        """FLOPs of the unsharded model in forward and backward over one sequence, by activation checkpointing mode."""
        config, context, source_len = self.options.config, self.options.context, self.options.source_len
        if self.unsharded.batch_size_per_device == 1:
            counter = self.unsharded.train_pass.counter
        else:
            counter = training_pass(config, 1, context, self.execution_config(), source_len=source_len).counter
        modes = ACTIVATION_CHECKPOINTING_MODES
        return {mode: count_flops(counter, context, activation_checkpointing=mode) for mode in modes}

    @property
    def flops(self) -> FlopCounts:
        """FLOPs of one sequence: of the forward pass in mode 'infer', of forward and backward pass in mode 'train'."""
        options = self.options
        return self.train_flops[options.activation_checkpointing] if options.mode == "train" else self.forward_flops

    # ------------------------------------------------------------------------------------ memory

    @cached_property
    def kv_cache(self) -> KVCacheSize:
        options = self.options
        return kv_cache_size(
            self.rank_config,
            batch_size=self.batch_size_per_device,
            context=options.context,
            source_len=options.source_len,
            dtype=options.kv_cache_dtype,
        )

    @cached_property
    def inference_memory(self) -> MemoryBreakdown:
        options = self.options
        encoder = isinstance(options.config, Encoder)
        source = options.source_len if len(options.config.stacks) == 2 else 1
        chunks = prefill_chunks(self.batch_size_per_device, options.context, source, unchunked=encoder)
        run = partial(inference_pass, self.rank_config, execution=self.execution_config(), serving=not encoder)
        passes = (run(rows, length, source_len=source, num_cached_tokens=past) for rows, length, past, source in chunks)
        peak_pass = max(passes, key=lambda cost: cost.peak_bytes)
        return inference_memory(self.rank_config, options.precision, self.kv_cache, peak_pass, on_gpu=self.on_gpu)

    @cached_property
    def training_memory(self) -> MemoryBreakdown:
        return training_memory(self.options, self.rank_config, self.train_pass, on_gpu=self.on_gpu)

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Collectives of one rank in one training step: {kind: (count, bytes)}.

        Of each collective, the larger of input and output is counted. The gradient all-reduce of DDP is not counted."""
        counter = self.train_pass.counter
        return {kind: (count, counter.collective_bytes[kind]) for kind, count in counter.num_collectives.items()}

    @property
    def memory(self) -> MemoryBreakdown:
        """Peak memory of one device in training or in inference, according to `options.mode`."""
        return self.training_memory if self.options.mode == "train" else self.inference_memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak memory fits in the device; None if no device is set or its memory size is unknown."""
        device = self.options.hardware
        return None if device is None or device.memory is None else self.memory.total_bytes <= device.memory

    # ------------------------------------------------------------------------------------ time

    @property
    def prefill_flops(self) -> FlopCounts:
        """FLOPs of prefilling one sequence on one device, with the logits of the last token only, as in serving."""
        flops = count_flops(self.prefill_pass.counter, self.options.context)
        return flops if isinstance(self.options.config, Encoder) else flops.with_last_logits_only()

    def _roofline_bound(self, workload: Workload) -> RooflineBound:
        hardware, precision = self.options.hardware, self.options.precision
        assert hardware is not None
        efficiency = expected_efficiency(workload.name, hardware, precision.name)
        bound = roofline_bound(workload, hardware, precision, efficiency)
        if not self._runs_in_engine_kernels(workload.name):
            return bound
        num_layers = self.options.config.stacks["decoder"].layers
        return replace(bound, engine_seconds=engine_seconds(workload, hardware, precision, num_layers))

    def _runs_in_engine_kernels(self, workload: str) -> bool:
        """Whether the engine runs prefill or decode steps in its own kernels, which support Nvidia GPUs."""
        options = self.options
        if workload == "train" or options.hardware is None or "nvidia" not in options.hardware.title.lower():
            return False
        has_experts = any(
            isinstance(block.ffn, Moe) for stack in options.config.stacks.values() for block in stack.blocks
        )
        is_quantized = options.precision.is_quantized
        if options.parallel_dims.tp > 1 or (has_experts and is_quantized):
            return False  # the engine's weight_bits leave experts in bf16
        if is_quantized and options.precision.name not in ("int8", "int4"):
            return False  # its times have not been measured
        if workload == "prefill":
            return has_engine_prefill(options.config)
        return has_engine_decode(options.config) and self.batch_size_per_device <= MAX_DECODE_ROWS

    def _inference_workload(self, name: str, flops: int, num_tokens: int, other_bytes: int, num_ops: int) -> Workload:
        """Workload of a pass over `num_tokens` tokens. `other_bytes`: bytes read or written besides the weights."""
        config, precision = self.rank_config, self.options.precision
        min_bytes, expected_bytes = (
            other_bytes
            + weight_bytes_read(config, precision, num_tokens, is_decode=name == "decode", expected=expected)
            for expected in (False, True)
        )
        return Workload(name, flops, min_bytes, num_tokens * self.dp_size, num_ops, expected_bytes)

    @property
    def prefill_workload(self) -> Workload:
        """Workload of prefilling the sequences of one device, which reads the weights once and writes the KV cache."""
        batch_size, cache_bytes = self.batch_size_per_device, self.kv_cache.total_bytes
        flops, num_tokens = batch_size * self.prefill_flops.total_visible, batch_size * self.options.context
        return self._inference_workload("prefill", flops, num_tokens, cache_bytes, self.prefill_pass.num_ops)

    @cached_property
    def prefill_time(self) -> RooflineBound | None:
        return None if self.options.hardware is None else self._roofline_bound(self.prefill_workload)

    def decode_workload(self, batch_size: int) -> Workload:
        """Workload of a decode step of `batch_size` sequences on one device. It reads all weights and the KV cache."""
        other_bytes = self.kv_cache.total_bytes // self.kv_cache.batch_size + self.decode_pass.logits_bytes
        flops = batch_size * count_flops(self.decode_pass.counter, 1).total_visible
        num_ops = self.decode_pass.num_ops
        return self._inference_workload("decode", flops, batch_size, batch_size * other_bytes, num_ops)

    @cached_property
    def decode_time(self) -> RooflineBound | None:
        if self.options.hardware is None or isinstance(self.options.config, Encoder):
            return None
        return self._roofline_bound(self.decode_workload(self.batch_size_per_device))

    @cached_property
    def compute_bound_batch_size(self) -> int | None:
        """Batch size per device from which decode is compute-bound.

        None if decode stays bandwidth-bound, if no device is set, or if the model is an encoder."""
        if self.decode_time is None:
            return None
        return find_compute_bound_batch_size(self.decode_workload, self.decode_time.ridge_point)

    @cached_property
    def train_time(self) -> RooflineBound | None:
        """Bounds of the time of a training step; None if no device is set.

        Memory traffic of the step: weights are read in the forward and the backward pass and, unless they are frozen,
        written in the optimizer step; gradients and optimizer state are read and written."""
        if self.options.hardware is None:
            return None
        memory, mode = self.training_memory.bytes_by_component, self.options.activation_checkpointing
        num_tokens = self.batch_size_per_device * self.options.context
        counts = count_flops(self.train_pass.counter, num_tokens, activation_checkpointing=mode)
        flops = counts.total_visible
        frozen = memory.get("frozen weights", 0)
        weights = memory["adapters"] if frozen else memory["weights"]
        nbytes = 2 * frozen + 3 * weights + 2 * memory["gradients"] + 2 * memory["optimizer"]
        num_ops = self.train_pass.num_ops
        num_tokens *= self.dp_size
        return self._roofline_bound(Workload("train", flops, nbytes, num_tokens, num_ops, nbytes, counts.float8))

    @property
    def time(self) -> RooflineBound | None:
        """Bounds of the time of a training step (mode 'train'), a decode step (mode 'infer') or prefill (an encoder).

        None if no device is set."""
        if self.options.mode == "train":
            return self.train_time
        return self.prefill_time if isinstance(self.options.config, Encoder) else self.decode_time

    @cached_property
    def training_budget(self) -> TrainingBudget:
        options = self.options
        flops_per_step = options.batch_size * self.train_flops[options.activation_checkpointing].total_visible
        return compute_training_budget(options, self.parameters, flops_per_step, self.train_time)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict that can be written as JSON."""
        return estimates_to_dict(self)

    def __repr__(self) -> str:
        options = self.options
        return f"SizeEstimate({self.num_parameters:,} parameters, {self.memory.total_bytes:,} bytes to {options.mode})"


def size(
    source: Config | Mapping[str, object] | str | Path,
    *,
    batch_size: int = 1,
    context: int | None = None,
    dtype: str | Precision | None = None,
    mode: str = "infer",
    hardware: Hardware | str | None = None,
    source_len: int | None = None,
    kv_cache_dtype: str | None = None,
    optimizer: str = "adamw",
    activation_checkpointing: str = "none",
    activation_checkpointing_layers: int | None = None,
    kernel: str = "auto",
    loss: str | None = None,
    packed: bool = False,
    adapter: LoRA | Mapping[str, Any] | None = None,
    quantization: str = "none",
    compiled: bool = False,
    world_size: int = 1,
    parallel: str = "dp",
    dp_shard: int | None = None,
    tp: int | None = None,
    train_tokens: int | None = None,
    price_per_hour: float | None = None,
) -> SizeEstimate:
    """Estimate the parameters, FLOPs, memory and time of a model from its configuration.

    `batch_size` is the global batch size and `context` the number of tokens per sequence. `mode` is 'infer' or 'train'.
    The default `dtype` is for inference that of the file if the source is a .gguf file or has quantized weights, else
    bf16, and for training mixed (fp32 weights, bf16 matmuls). `hardware` is a
    device name, 'local' (this machine, as measured by `cutaway bench`) or a `Hardware`. `tp` and `dp_shard` are the
    tensor-parallel and FSDP group sizes. `activation_checkpointing_layers` is the number of layers, from the first, to
    which activation checkpointing applies; the default is all. `adapter` is the LoRA configuration of adapters, such as
    {'rank': 16}, which are then trained on a frozen base; `quantization` is that of the frozen base: 'none', 'nf4'
    (QLoRA) or 'int8'. The default `loss` is 'full', or 'chunked' with an adapter. `compiled`: blocks are compiled, as
    in `cutaway train` on a GPU, and store fewer activations than in eager execution. `parallel='tp'` or
    `parallel='fsdp'` uses all remaining devices of `world_size` for that dimension.
    """
    check_size_is_published(source)
    config = read_config(source)
    for name, value, choices in (
        ("mode", mode, MODE_LABELS),
        ("activation_checkpointing", activation_checkpointing, ACTIVATION_CHECKPOINTING_MODES),
        ("kernel", kernel, ATTENTION_KERNELS),
        ("loss", "full" if loss is None else loss, LOSS_MODES),
        ("quantization", quantization, QUANTIZATIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("kv_cache_dtype", "bf16" if kv_cache_dtype is None else kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if not (isinstance(value, str) and value in choices):
            raise InputError(f"{name} {value!r} is not known; use one of {', '.join(choices)}")
    batch_size, world_size = check_count("batch_size", batch_size), check_count("world_size", world_size)
    layers = check_optional_count("activation_checkpointing_layers", activation_checkpointing_layers)
    if layers is not None and activation_checkpointing == "none":
        raise InputError(
            f"activation_checkpointing_layers is {layers}, but activation_checkpointing is 'none'; pass 'full', or"
            " leave out activation_checkpointing_layers"
        )
    context, source_len = check_optional_count("context", context), check_optional_count("source_len", source_len)
    dp_shard, tp = check_optional_count("dp_shard", dp_shard), check_optional_count("tp", tp)
    device = resolve_hardware(hardware)
    if price_per_hour is not None and device is None:
        raise InputError(
            "price_per_hour is set, but hardware is not, so the cost is unknown; pass a device, as in --gpu h100"
        )
    if price_per_hour is not None and not (isinstance(price_per_hour, int | float) and 0 <= price_per_hour < 1e12):
        raise InputError(f"price_per_hour is {price_per_hour!r}; pass the cost of one device per hour, at least 0")
    length = context or min(config.context or FALLBACK_CONTEXT, MAX_DEFAULT_CONTEXT)
    lora = read_adapter(adapter)
    dims = resolve_parallel_dims(parallel, world_size, batch_size, dp_shard, tp)
    _check_adapter_options(lora, mode, quantization, dims)
    find_precision = get_precision if lora is None else get_adapter_precision
    if dtype is None and mode == "infer":
        dtype = stored_precision(source)
    if not isinstance(dtype, Precision):
        dtype = find_precision(dtype or ("mixed" if mode == "train" else "bf16"))
    precision = dtype
    options = SizeOptions(
        config=config,
        mode=mode,
        batch_size=batch_size,
        context=length,
        source_len=source_len or length,
        precision=precision,
        kv_cache_dtype=kv_cache_dtype or ("fp32" if precision.name == "fp32" else "bf16"),
        optimizer=optimizer,
        activation_checkpointing=activation_checkpointing,
        activation_checkpointing_layers=layers,
        kernel=kernel,
        loss=loss or ("full" if lora is None else "chunked"),
        packed=packed,
        adapter=lora,
        quantization=quantization,
        compiled=compiled,
        hardware=device,
        world_size=world_size,
        parallel=parallel,
        parallel_dims=dims,
        train_tokens=check_optional_count("train_tokens", train_tokens),
        price_per_hour=price_per_hour,
    )
    return SizeEstimate(options)


def _check_adapter_options(adapter: LoRA | None, mode: str, quantization: str, dims: ParallelDims) -> None:
    if adapter is None and quantization != "none":
        raise InputError(
            f"quantization is {quantization}, but quantized weights cannot be trained; pass an adapter too, such as"
            " {'rank': 16}, or for inference a dtype such as int4"
        )
    if adapter is None:
        return
    if mode != "train":
        raise InputError("adapter is for training; pass mode='train'. A merged adapter needs no memory in inference")
    if dims.dp_shard > 1 or dims.tp > 1:
        raise InputError(
            "an adapter cannot be trained with FSDP or tensor parallelism, which shard the base weights; use parallel"
            " 'dp': each device then has a copy of the frozen base"
        )
