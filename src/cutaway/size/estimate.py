"""`ct.size`: parameter counts, FLOPs, memory and time of a configuration, and their conversion to JSON."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from cutaway.config.transformer import Config, Encoder
from cutaway.size.flops import FlopCounts, count_flops
from cutaway.size.hardware import Hardware
from cutaway.size.kv_cache import KVCacheSize, kv_cache_size
from cutaway.size.measured_hardware import expected_efficiency
from cutaway.size.memory import MemoryBreakdown, inference_memory, prefill_chunks, training_memory
from cutaway.size.options import ACTIVATION_CHECKPOINTING_MODES, SizeOptions, resolve_options
from cutaway.size.parallel import ParallelDims, shard_config
from cutaway.size.parameters import LayerParameterCounts, ParameterCounts, count_parameters
from cutaway.size.roofline import (
    RooflineBound,
    Workload,
    decode_workload,
    find_compute_bound_batch_size,
    prefill_workload,
    roofline_bound,
    train_workload,
)
from cutaway.size.shape_pass import ExecutionConfig, PassCost, inference_pass, training_pass
from cutaway.size.state_dict import CheckpointSize, checkpoint_size
from cutaway.size.training_budget import TrainingBudget, compute_training_budget

cached_inference_pass = lru_cache(maxsize=32)(inference_pass)
"""Cached because estimates that differ only in batch size or device share these passes."""


class SizeEstimate:
    """Size estimate of one configuration. Each attribute is computed on first access."""

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
        """Tensors, elements and bytes of a checkpoint."""
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
        """Sequences per device."""
        return self.options.batch_size // self.dp_size

    def execution_config(self, activation_checkpointing: str = "none") -> ExecutionConfig:
        options = self.options
        return options.precision.execution_config(
            options.parallel_dims,
            kernel=options.kernel,
            activation_checkpointing=activation_checkpointing,
            device="cuda" if self.on_gpu else "cpu",
            resid_in_compute_dtype=options.loss == "chunked",
        )

    # ------------------------------------------------------------------------------------ FLOPs

    @cached_property
    def prefill_pass(self) -> PassCost:
        """Forward pass over one sequence of `context` tokens, on one device."""
        return cached_inference_pass(
            self.rank_config, 1, self.options.context, self.execution_config(), source_len=self.options.source_len
        )

    @cached_property
    def decode_pass(self) -> PassCost:
        """Decode step that extends one sequence to `context` tokens, on one device."""
        return cached_inference_pass(
            self.rank_config,
            1,
            1,
            self.execution_config(),
            source_len=self.options.source_len,
            num_cached_tokens=self.options.context - 1,
            source_cached=True,
        )

    @cached_property
    def train_pass(self) -> PassCost:
        """Forward and backward pass of one training step, on one device."""
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
        parallel_dims = ParallelDims(options.parallel_dims.dp_replicate, options.parallel_dims.dp_shard)
        return SizeEstimate(
            replace(options, world_size=parallel_dims.dp_size, parallel="dp", parallel_dims=parallel_dims)
        )

    @cached_property
    def forward_flops(self) -> FlopCounts:
        """FLOPs of the forward pass over one sequence of `context` tokens."""
        return count_flops(self.unsharded.prefill_pass.counter, self.options.context)

    @cached_property
    def decode_flops(self) -> FlopCounts | None:
        """FLOPs of the decode step that extends a sequence to `context` tokens; None for an encoder."""
        return None if isinstance(self.options.config, Encoder) else count_flops(self.unsharded.decode_pass.counter, 1)

    @cached_property
    def train_flops(self) -> dict[str, FlopCounts]:
        """FLOPs of the forward and backward pass over one sequence, by activation checkpointing mode."""
        options = self.options
        pass_cost = (
            self.unsharded.train_pass
            if self.unsharded.batch_size_per_device == 1
            else training_pass(
                options.config, 1, options.context, self.execution_config(), source_len=options.source_len
            )
        )
        return {
            mode: count_flops(pass_cost.counter, options.context, activation_checkpointing=mode)
            for mode in ACTIVATION_CHECKPOINTING_MODES
        }

    @property
    def flops(self) -> FlopCounts:
        """FLOPs of one sequence in the mode of the options: forward, or forward and backward."""
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
        passes = (
            inference_pass(
                self.rank_config,
                rows,
                length,
                self.execution_config(),
                source_len=source,
                num_cached_tokens=past,
                serving=not encoder,
            )
            for rows, length, past, source in chunks
        )
        peak_pass = max(passes, key=lambda cost: cost.peak_bytes)
        return inference_memory(self.rank_config, options.precision, self.kv_cache, peak_pass, on_gpu=self.on_gpu)

    @cached_property
    def training_memory(self) -> MemoryBreakdown:
        options = self.options
        return training_memory(
            self.rank_config,
            options.precision,
            options.optimizer,
            self.train_pass,
            on_gpu=self.on_gpu,
            parallel_dims=options.parallel_dims,
        )

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """Collectives of one training step: {kind: (count, bytes of the unsharded tensors)}."""
        return {
            kind: (count, self.train_pass.counter.collective_bytes[kind])
            for kind, count in self.train_pass.counter.num_collectives.items()
        }

    @property
    def memory(self) -> MemoryBreakdown:
        """Peak memory of one device in the mode of the options."""
        return self.training_memory if self.options.mode == "train" else self.inference_memory

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in the device's memory; None if the memory is unknown."""
        device = self.options.hardware
        return None if device is None or device.memory is None else self.memory.total_bytes <= device.memory

    # ------------------------------------------------------------------------------------ time

    @property
    def prefill_flops(self) -> FlopCounts:
        """FLOPs of prefilling one sequence on one device, with the logits of the last token only, as in serving."""
        flops = count_flops(self.prefill_pass.counter, self.options.context)
        return flops if isinstance(self.options.config, Encoder) else flops.with_last_logits_only()

    @cached_property
    def prefill_time(self) -> RooflineBound | None:
        options = self.options
        if options.hardware is None:
            return None
        num_tokens = self.batch_size_per_device * options.context
        workload = prefill_workload(
            self.rank_config,
            options.precision,
            self.prefill_flops.scale(self.batch_size_per_device),
            num_tokens=num_tokens,
            kv_cache_bytes=self.kv_cache.total_bytes,
            num_kernel_launches=self.prefill_pass.num_ops,
            dp_size=self.dp_size,
        )
        return roofline_bound(
            workload,
            options.hardware,
            options.precision,
            expected_efficiency(workload.name, options.hardware, options.precision.name),
        )

    def decode_workload(self, batch_size: int) -> Workload:
        """Workload of one decode step with `batch_size` sequences on one device."""
        return decode_workload(
            self.rank_config,
            self.options.precision,
            count_flops(self.decode_pass.counter, 1).scale(batch_size),
            batch_size=batch_size,
            kv_cache_bytes=batch_size * (self.kv_cache.total_bytes // self.kv_cache.batch_size),
            logits_bytes=batch_size * self.decode_pass.logits_bytes,
            num_kernel_launches=self.decode_pass.num_ops,
            dp_size=self.dp_size,
        )

    @cached_property
    def decode_time(self) -> RooflineBound | None:
        options = self.options
        if options.hardware is None or isinstance(options.config, Encoder):
            return None
        efficiency = expected_efficiency("decode", options.hardware, options.precision.name)
        return roofline_bound(
            self.decode_workload(self.batch_size_per_device), options.hardware, options.precision, efficiency
        )

    @cached_property
    def compute_bound_batch_size(self) -> int | None:
        """Batch size per device from which decode is compute-bound; None if it stays bandwidth-bound."""
        return (
            None
            if self.decode_time is None
            else find_compute_bound_batch_size(self.decode_workload, self.decode_time.ridge_point)
        )

    @cached_property
    def train_time(self) -> RooflineBound | None:
        options = self.options
        if options.hardware is None:
            return None
        bytes_by_component = self.training_memory.bytes_by_component
        workload = train_workload(
            count_flops(
                self.train_pass.counter,
                self.batch_size_per_device * options.context,
                activation_checkpointing=options.activation_checkpointing,
            ),
            weight_bytes=bytes_by_component["weights"],
            grad_bytes=bytes_by_component["gradients"],
            optimizer_bytes=bytes_by_component["optimizer"],
            num_tokens=self.batch_size_per_device * options.context,
            num_kernel_launches=self.train_pass.num_ops,
            dp_size=self.dp_size,
        )
        return roofline_bound(
            workload,
            options.hardware,
            options.precision,
            expected_efficiency(workload.name, options.hardware, options.precision.name),
        )

    @property
    def time(self) -> RooflineBound | None:
        """Time of a training step in mode 'train'; else of a decode step (for an encoder, of prefill)."""
        if self.options.mode == "train":
            return self.train_time
        return self.prefill_time if isinstance(self.options.config, Encoder) else self.decode_time

    @cached_property
    def training_budget(self) -> TrainingBudget:
        options = self.options
        flops_per_step = options.batch_size * self.train_flops[options.activation_checkpointing].total_visible
        return compute_training_budget(
            options.train_tokens,
            num_parameters=self.num_parameters,
            num_active_parameters=self.parameters.active,
            tokens_per_step=options.batch_size * options.context,
            flops_per_step=flops_per_step,
            world_size=options.world_size,
            hardware=options.hardware,
            bound=self.train_time,
            price_per_hour=options.price_per_hour,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict that can be written as JSON."""
        return estimates_to_dict(self)

    def __repr__(self) -> str:
        options = self.options
        return f"SizeEstimate({self.num_parameters:,} parameters, {self.memory.total_bytes:,} bytes to {options.mode})"


def size(
    source: Config | Mapping[str, Any] | str | Path,
    *,
    batch_size: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    mode: str = "infer",
    hardware: Hardware | str | None = None,
    source_len: int | None = None,
    kv_cache_dtype: str | None = None,
    optimizer: str = "adamw",
    activation_checkpointing: str = "none",
    kernel: str = "auto",
    loss: str = "full",
    packed: bool = False,
    world_size: int = 1,
    parallel: str = "dp",
    dp_shard: int | None = None,
    tp: int | None = None,
    train_tokens: int | None = None,
    price_per_hour: float | None = None,
) -> SizeEstimate:
    """Estimate the parameters, FLOPs, memory and time of a model from its configuration.

    `batch_size` is the global batch size and `context` the tokens per sequence. `mode` is 'infer' or 'train'. The
    default `dtype` is bf16 for inference and mixed (fp32 weights, bf16 matmuls) for training. `hardware` is a device
    name, 'local' (as measured by `cutaway bench`) or a `Hardware`. `tp` and `dp_shard` are the tensor-parallel and
    FSDP group sizes; `parallel='tp'` or `'fsdp'` uses all remaining devices of `world_size` for that dimension.
    """
    return SizeEstimate(resolve_options(**locals()))


CONVENTION = (
    "2 FLOPs per multiply-add, matrix multiplications only; 'full' counts attention over all pairs of tokens,"
    " 'visible' over the pairs that the mask leaves visible (and MLA with absorbed up-projections if that is less);"
    " memory is per device, in bytes, with a fused optimizer"
)


def estimates_to_dict(estimate: SizeEstimate, *others: SizeEstimate) -> dict[str, Any]:
    """Convert an estimate to a dict; `others` are estimates of the same model and options in another mode."""
    config = estimate.options.config
    estimates = (estimate, *others)
    result: dict[str, Any] = {
        "model": {
            "form": config.form,
            "layers": {name: stack.layers for name, stack in config.stacks.items()},
            "d_model": config.d_model,
            "vocab_size": config.vocab_size,
            "context": config.context,
        },
        "options": {item.options.mode: options_to_dict(item) for item in estimates},
        "conventions": CONVENTION,
        "parameters": _parameters_to_dict(estimate.parameters),
        "checkpoint": asdict(estimate.checkpoint),
        "flops": _all_flops_to_dict(estimate, estimates[-1]),
        "memory": {item.options.mode: _memory_to_dict(item.memory) for item in estimates},
    }
    if estimate.options.world_size > 1:
        result["collectives"] = {
            kind: {"count": count, "bytes": nbytes}
            for item in estimates
            if item.options.mode == "train"
            for kind, (count, nbytes) in item.collectives.items()
        }
    if not isinstance(config, Encoder):
        result["kv_cache"] = _kv_cache_to_dict(estimate.kv_cache)
    if estimate.options.hardware is not None:
        result["hardware"] = asdict(estimate.options.hardware)
        result["fits"] = {item.options.mode: item.fits for item in estimates}
        result["time"] = {item.options.mode: _times_to_dict(item) for item in estimates}
    if estimate.options.mode == "train" and not others:  # a training estimate alone also compares the modes
        result["memory"]["train"]["by_activation_checkpointing"] = _memory_by_activation_checkpointing(estimate)
    for item in estimates:
        if item.options.mode == "train":
            result["training_budget"] = {
                name: value for name, value in asdict(item.training_budget).items() if value is not None
            }
            result["training_budget"]["tokens_per_parameter"] = item.training_budget.tokens_per_parameter
    return result


def _all_flops_to_dict(estimate: SizeEstimate, train_estimate: SizeEstimate) -> dict[str, Any]:
    """FLOPs of a forward pass, a decode step and a training pass; `train_estimate` may have the last one cached."""
    params, options = estimate.parameters, estimate.options
    encoder_parameters = (
        sum(layer.active for layer in params.unique_layers if layer.stack == "encoder")
        if params.is_encoder_decoder
        else 0
    )
    decoder_parameters = params.active - encoder_parameters
    parameter_tokens = (
        encoder_parameters * options.source_len + decoder_parameters * options.context
    )  # N·D, summed over encoder and decoder
    result: dict[str, Any] = {"forward": _flops_to_dict(estimate.forward_flops, "2ND", 2 * parameter_tokens)}
    if estimate.decode_flops is not None:
        result["decode"] = _flops_to_dict(estimate.decode_flops, "2N", 2 * decoder_parameters)
    return result | {
        "train": {
            mode: _flops_to_dict(flops, "6ND", 6 * parameter_tokens)
            for mode, flops in train_estimate.train_flops.items()
        }
    }


def options_to_dict(estimate: SizeEstimate) -> dict[str, Any]:
    options = estimate.options
    fields = {
        name: value
        for name, value in vars(options).items()
        if name not in ("config", "hardware", "precision", "parallel_dims")
    }
    fields |= asdict(options.parallel_dims) | {"parallel_dims": str(options.parallel_dims)}
    fields |= {"dtype": options.precision.name, "hardware": options.hardware.name if options.hardware else None}
    return fields | {
        "batch_size_per_device": estimate.batch_size_per_device,
        "context_warning": options.context_warning or None,
    }


def _parameters_to_dict(counts: ParameterCounts) -> dict[str, Any]:
    non_layer = {
        name: getattr(counts, name)
        for name in (
            "embedding",
            "positions",
            "token_types",
            "embedding_projection",
            "embedding_norm",
            "final_norm",
            "head",
            "head_transform",
            "pooler",
        )
    }
    totals = {"total": counts.total, "active": counts.active, "non_embedding": counts.non_embedding}
    return (
        totals
        | non_layer
        | {"layers": [layer | {"num_layers": count} for layer, count in _group_equal_layers(counts.per_layer)]}
    )


def _group_equal_layers(layers: tuple[LayerParameterCounts, ...]) -> list[tuple[dict[str, Any], int]]:
    """Run-length encoding of equal consecutive layers."""
    runs = [(layer, len(list(run))) for layer, run in groupby(layers)]
    return [(asdict(layer) | {"total": layer.total, "active": layer.active}, count) for layer, count in runs]


def _flops_to_dict(flops: FlopCounts, rule_name: str, rule_flops: int) -> dict[str, Any]:
    return {
        "num_tokens": flops.num_tokens,
        "total": flops.total,
        "total_visible": flops.total_visible,
        "per_token": flops.per_token,
        "per_token_visible": flops.per_token_visible,
        "full": flops.full,
        "visible": flops.visible,
        "rule_of_thumb": {"name": rule_name, "flops": rule_flops, "error": flops.rule_of_thumb_error(rule_flops)},
    }


def _memory_to_dict(memory: MemoryBreakdown) -> dict[str, Any]:
    return {
        "total_bytes": memory.total_bytes,
        "peak_phase": memory.peak_phase,
        "peak_by_component": memory.peak_by_component,
        "bytes_by_component": memory.bytes_by_component,
    }


def _memory_by_activation_checkpointing(estimate: SizeEstimate) -> dict[str, Any]:
    """Memory of a training step in each mode, with the selected attention kernel and with the explicit kernel."""
    options, result = estimate.options, {}
    for mode in ACTIVATION_CHECKPOINTING_MODES:
        kernels = dict.fromkeys((options.kernel, "explicit"))
        by_kernel = {
            kernel: type(estimate)(replace(options, activation_checkpointing=mode, kernel=kernel)).training_memory
            for kernel in kernels
        }
        result[mode] = {
            kernel: {"activations": memory.bytes_by_component["activations"], "total_bytes": memory.total_bytes}
            for kernel, memory in by_kernel.items()
        }
    return result


def _kv_cache_to_dict(cache: KVCacheSize) -> dict[str, Any]:
    return {
        "total_bytes": cache.total_bytes,
        "bytes_per_token": cache.bytes_per_token,
        "unwindowed_bytes": cache.unwindowed_bytes,
        "expanded_bytes": cache.expanded_bytes,
        "by_kind": {kind: {"num_layers": count, "bytes": nbytes} for kind, (count, nbytes) in cache.by_kind.items()},
    }


def _times_to_dict(estimate: SizeEstimate) -> dict[str, Any]:
    if estimate.options.mode == "train":
        return {"train_step": _bound_to_dict(estimate.train_time)}
    result = {"prefill": _bound_to_dict(estimate.prefill_time)}
    if not isinstance(estimate.options.config, Encoder):
        crossover = {"compute_bound_batch_size": estimate.compute_bound_batch_size}
        result |= {"decode": _bound_to_dict(estimate.decode_time) | crossover}
    return result


def _bound_to_dict(bound: RooflineBound | None) -> dict[str, Any]:
    assert bound is not None
    return {
        "min_seconds": bound.min_seconds,
        "bottleneck": bound.bottleneck,
        "compute_seconds": bound.compute_seconds,
        "bandwidth_seconds": bound.bandwidth_seconds,
        "arithmetic_intensity": bound.arithmetic_intensity,
        "ridge_point": bound.ridge_point,
        "num_tokens": bound.num_tokens,
        "max_tokens_per_second": bound.max_tokens_per_second,
        "expected_seconds": [bound.expected_seconds_low, bound.expected_seconds_high],
        "eager_seconds_high": bound.eager_seconds_high,
        "expected_tokens_per_second": [
            bound.num_tokens / bound.expected_seconds_high,
            bound.num_tokens / bound.expected_seconds_low,
        ],
        "efficiency": asdict(bound.efficiency),
    }
