"""JSON form of estimates: parameters, FLOPs, memory, KV cache, times and training budget as a dict."""

from dataclasses import asdict, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cutaway.config.transformer import Encoder
from cutaway.size.adapters import list_adapter_tensors
from cutaway.size.flops import FlopCounts
from cutaway.size.kv_cache import KVCacheSize
from cutaway.size.options import ACTIVATION_CHECKPOINTING_MODES, SizeOptions
from cutaway.size.parameters import ParameterCounts, count_parameters
from cutaway.size.roofline import RooflineBound

if TYPE_CHECKING:
    from cutaway.size.estimate import SizeEstimate

_CONVENTION = (
    "2 FLOPs per multiply-add, matrix multiplications only; 'full' counts attention over all pairs of tokens,"
    " 'visible' over the pairs that the mask leaves visible (MLA: with absorbed up-projections if this needs fewer);"
    " memory is per device, in bytes, with a fused optimizer"
)


def estimates_to_dict(estimate: "SizeEstimate", *others: "SizeEstimate") -> dict[str, Any]:
    """Convert an estimate to a JSON dict; `others` are estimates of the same model and options in another mode."""
    config = estimate.options.config
    estimates = {item.options.mode: item for item in (estimate, *others)}
    training = estimates.get("train")
    memory_names = ("total_bytes", "peak_phase", "peak_by_component", "bytes_by_component")
    memory = {mode: _pick(item.memory, *memory_names) for mode, item in estimates.items()}
    if training is estimate and not others:  # a training estimate alone also compares activation checkpointing modes
        memory["train"]["by_activation_checkpointing"] = _memory_by_activation_checkpointing(estimate)
    result: dict[str, object] = {
        "model": {
            "form": config.form,
            "layers": {name: stack.layers for name, stack in config.stacks.items()},
            **_pick(config, "d_model", "vocab_size", "context"),
        },
        "options": {mode: options_to_dict(item) for mode, item in estimates.items()},
        "conventions": _CONVENTION,
        "parameters": _parameters_to_dict(estimate.parameters) | _trainable_to_dict(estimate.options),
        "checkpoint": asdict(estimate.checkpoint),
        "flops": _all_flops_to_dict(estimate, (estimate, *others)[-1]),
        "memory": memory,
    }
    if estimate.options.world_size > 1:
        collectives = {} if training is None else training.collectives
        result["collectives"] = {
            kind: {"count": count, "bytes": nbytes} for kind, (count, nbytes) in collectives.items()
        }
    if not isinstance(config, Encoder):
        result["kv_cache"] = _kv_cache_to_dict(estimate.kv_cache)
    if estimate.options.hardware is not None:
        result["hardware"] = asdict(estimate.options.hardware)
        result["fits"] = {mode: item.fits for mode, item in estimates.items()}
        result["time"] = {mode: _times_to_dict(item) for mode, item in estimates.items()}
    if training is not None and (training.options.adapter is None or training.options.train_tokens is not None):
        budget = training.training_budget
        known = {name: value for name, value in asdict(budget).items() if value is not None}
        ratios = {name: getattr(budget, name) for name in ("tokens_per_parameter", "chinchilla_ratio")}
        result["training_budget"] = known | ratios
    return result


def _pick(item: object, *names: str) -> dict[str, object]:
    """Return the attributes with these names as a dict."""
    return {name: getattr(item, name) for name in names}


def _all_flops_to_dict(estimate: "SizeEstimate", train_estimate: "SizeEstimate") -> dict[str, object]:
    """FLOPs of one sequence in a forward pass, a decode step and a training pass, each with its rule of thumb.

    The FLOPs of the training pass are read from `train_estimate`, where they may be cached."""
    params, options = estimate.parameters, estimate.options
    encoder_parameters = 0
    if params.is_encoder_decoder:
        encoder_parameters = sum(layer.active for layer in params.unique_layers if layer.stack == "encoder")
    decoder_parameters = params.active - encoder_parameters
    # parameters · tokens (N·D), summed over encoder and decoder
    parameter_tokens = encoder_parameters * options.source_len + decoder_parameters * options.context
    result: dict[str, object] = {"forward": _flops_to_dict(estimate.forward_flops, "2ND", 2 * parameter_tokens)}
    if estimate.decode_flops is not None:
        result["decode"] = _flops_to_dict(estimate.decode_flops, "2N", 2 * decoder_parameters)
    result["train"] = {
        mode: _flops_to_dict(flops, "6ND", 6 * parameter_tokens) for mode, flops in train_estimate.train_flops.items()
    }
    return result


def options_to_dict(estimate: "SizeEstimate") -> dict[str, object]:
    options = estimate.options
    resolved = ("config", "hardware", "precision", "parallel_dims", "frozen_base")
    fields = {name: value for name, value in vars(options).items() if name not in resolved}
    fields |= asdict(options.parallel_dims) | {"parallel_dims": str(options.parallel_dims)}
    fields |= {
        "dtype": options.precision.name,
        "stored_as": options.precision.stored_as or None,
        "hardware": options.hardware.name if options.hardware else None,
    }
    fields["batch_size_per_device"] = estimate.batch_size_per_device
    fields["stores_attention_scores"] = estimate.stores_attention_scores
    fields["adapter"] = None if options.adapter is None else options.adapter.model_dump(mode="json")
    return fields | {"context_warning": options.context_warning or None}


def _parameters_to_dict(counts: ParameterCounts) -> dict[str, object]:
    result = _pick(counts, "total", "active", "non_embedding")
    result |= {field.name: getattr(counts, field.name) for field in fields(counts) if field.name != "per_layer"}
    runs = [(layer, len(list(run))) for layer, run in groupby(counts.per_layer)]  # equal consecutive layers
    result["layers"] = [
        asdict(layer) | {"total": layer.total, "active": layer.active, "num_layers": count} for layer, count in runs
    ]
    return result


def _trainable_to_dict(options: SizeOptions) -> dict[str, int]:
    """Numbers of trained and frozen parameters; empty if all parameters are trained."""
    if options.frozen_base is None:
        return {}
    trainable = sum(tensor.numel for tensor in list_adapter_tensors(options.config, options.frozen_base))
    return {"trainable": trainable, "frozen": count_parameters(options.config).total}


def _flops_to_dict(flops: FlopCounts, rule_name: str, rule_flops: int) -> dict[str, object]:
    names = ("num_tokens", "total", "total_visible", "per_token", "per_token_visible", "full", "visible")
    rule = {"name": rule_name, "flops": rule_flops, "error": flops.rule_of_thumb_error(rule_flops)}
    return _pick(flops, *names) | {"rule_of_thumb": rule}


def _memory_by_activation_checkpointing(estimate: "SizeEstimate") -> dict[str, dict[str, dict[str, int]]]:
    """Memory of a training step by activation checkpointing mode and by kernel (the selected one and 'explicit')."""
    result: dict[str, dict[str, dict[str, int]]] = {}
    for mode in ACTIVATION_CHECKPOINTING_MODES:
        result[mode] = {}
        for kernel in dict.fromkeys((estimate.options.kernel, "explicit")):
            options = replace(estimate.options, activation_checkpointing=mode, kernel=kernel)
            memory = type(estimate)(options).training_memory
            activations = memory.bytes_by_component["activations"]
            result[mode][kernel] = {"activations": activations, "total_bytes": memory.total_bytes}
    return result


def _kv_cache_to_dict(cache: KVCacheSize) -> dict[str, object]:
    by_kind = {kind: {"num_layers": count, "bytes": nbytes} for kind, (count, nbytes) in cache.by_kind.items()}
    names = ("total_bytes", "bytes_per_token", "unwindowed_bytes", "expanded_bytes")
    return _pick(cache, *names) | {"by_kind": by_kind}


def _times_to_dict(estimate: "SizeEstimate") -> dict[str, object]:
    if estimate.options.mode == "train":
        return {"train_step": _bound_to_dict(estimate.train_time)}
    result: dict[str, object] = {"prefill": _bound_to_dict(estimate.prefill_time)}
    if not isinstance(estimate.options.config, Encoder):
        crossover = {"compute_bound_batch_size": estimate.compute_bound_batch_size}
        result["decode"] = _bound_to_dict(estimate.decode_time) | crossover
    return result


def _bound_to_dict(bound: RooflineBound | None) -> dict[str, object]:
    assert bound is not None
    low, high = bound.expected_seconds_low, bound.expected_seconds_high
    names = ("min_seconds", "bottleneck", "compute_seconds", "bandwidth_seconds", "arithmetic_intensity", "ridge_point")
    return _pick(bound, *names, "num_tokens", "max_tokens_per_second") | {
        "expected_seconds": [low, high],
        "eager_seconds_high": bound.eager_seconds_high,
        "engine_seconds": None if bound.engine_seconds is None else list(bound.engine_seconds),
        "expected_tokens_per_second": [bound.num_tokens / high, bound.num_tokens / low],
        "efficiency": asdict(bound.efficiency),
    }
