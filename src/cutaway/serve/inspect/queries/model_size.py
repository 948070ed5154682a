"""Queries: parameters, FLOPs, memory and roofline of model shapes (`ct.size`)."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.presets import PRESETS, presets
from cutaway.config.transformer import Encoder
from cutaway.errors import CutawayError, InputError
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult
from cutaway.size import Hardware, SizeEstimate, list_hardware, size
from cutaway.size.memory_fit import SEARCH_LIMIT, find_max_context, find_max_fitting, max_position_embeddings
from cutaway.size.plot import component_group, group_components
from cutaway.size.precision import PRECISIONS
from cutaway.size.roofline import RooflineBound

LOADED_MODEL = "this model"
"""Name for the inspected model. All other names are presets; paths are not accepted."""

BOUND_FIELDS = (
    "name", "min_seconds", "bottleneck", "arithmetic_intensity", "ridge_point", "max_tokens_per_second",
)  # fmt: skip
DEVICE_FIELDS = ("name", "title", "kind", "memory", "bandwidth")
Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]


class ModelShape(BaseModel):
    """Name of a base model (the inspected model or a preset), and values that override fields of its config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[str, Field(max_length=100)] = LOADED_MODEL
    layers: Annotated[int, Field(strict=True, ge=1, le=512)] | None = None
    d_model: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    hidden: Count | None = None
    vocab_size: Count | None = None

    def resolve_config(self, inspector: Inspector) -> Config:
        """Return the base model's config with the overrides. Invalid overrides raise the same error as `ct.config`."""
        if self.base != LOADED_MODEL and self.base not in PRESETS:
            raise InputError(f"'{self.base[:40]}' is not a preset; choose one from the list")
        base_config = inspector.config if self.base == LOADED_MODEL else read_config(self.base)
        changes = self.model_dump(exclude={"base"}, exclude_none=True)
        return apply_overrides(base_config, changes) if changes else base_config


def apply_overrides(base_config: Config, overrides: dict[str, int]) -> Config:
    """Return the config with these fields overridden in every stack and block that has them."""

    def select(*names: str) -> dict[str, int]:
        return {name: overrides[name] for name in names if name in overrides}

    data = to_dict(base_config) | select("d_model", "vocab_size")
    for side in base_config.stacks:
        stack = data[side]
        stack |= select("layers")
        for block in [*stack["block"], *stack.get("leading_blocks", ())]:
            for attention in [block[name] for name in ("attention", "cross") if name in block]:
                # Latent attention has no kv_heads.
                attention |= select("heads") if attention["kind"] == "latent" else select("heads", "kv_heads")
            ffn = block["ffn"]["expert"] if block["ffn"]["kind"] == "moe" else block["ffn"]
            ffn |= select("hidden")
    return read_config(data)


def _get_shape(config: Config) -> dict[str, int | None]:
    """Return the config fields that can be overridden, and the context. They are None if the model does not have them.

    Values that differ between blocks are those of the last block of the last stack.
    """
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    expert = block.ffn.expert if block.ffn.kind == "moe" else block.ffn
    return {
        "layers": stack.layers,
        "d_model": config.d_model,
        "heads": block.attention.heads,
        "kv_heads": getattr(block.attention, "num_kv_heads", None),
        "hidden": expert.hidden_dim(config.d_model),
        "vocab_size": config.vocab_size,
        "context": config.context,
    }


class SizeQuery(Query):
    """Base class of the size queries, with the options of `ct.size` that these queries share."""

    batch_size: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    context: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    dtype: Annotated[str, Field(max_length=20)] | None = None
    mode: Literal["infer", "train"] = "infer"
    hardware: Annotated[str, Field(max_length=60)] | None = None

    def compute_size(self, config: Config) -> SizeEstimate:
        if self.hardware not in (None, *(device.name for device in list_hardware())):
            raise InputError(f"'{str(self.hardware)[:40]}' is not a known device; choose one from the list")
        options = {name: getattr(self, name) for name in SizeQuery.model_fields}
        return size(config, **options)


class ModelSizes(SizeQuery):
    """Parameters, FLOPs, memory by component and roofline of up to four models.

    A model whose config is invalid has an error message instead.
    """

    models: Annotated[tuple[ModelShape, ...], Field(min_length=1, max_length=4)] = (ModelShape(),)

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        descriptions = [self.describe_model(shape, inspector) for shape in self.models]
        contexts = {description["context"] for description in descriptions if "context" in description}
        if len(contexts) > 1:  # default contexts differ between models; use the shortest for all
            shared = self.model_copy(update={"context": min(contexts)})
            descriptions = [shared.describe_model(shape, inspector) for shape in self.models]
        return QueryResult({"models": descriptions})

    def describe_model(self, shape: ModelShape, inspector: Inspector) -> dict[str, Any]:
        try:
            estimate = self.compute_size(shape.resolve_config(inspector))
            base_shape = _get_shape(ModelShape(base=shape.base).resolve_config(inspector))
            return {"base": shape.base, "base_shape": base_shape} | _size_to_dict(estimate)
        except CutawayError as error:
            return {"base": shape.base, "error": str(error)}


def _size_to_dict(size_result: SizeEstimate) -> dict[str, object]:
    options, memory, flops = size_result.options, size_result.memory, size_result.flops
    peak_by_component = {name: size for name, size in group_components(memory.peak_by_component).items() if size}
    return {
        "shape": _get_shape(options.config),
        "context": options.context,
        "dtype": options.precision.name,
        "context_warning": options.context_warning or None,
        "num_parameters": size_result.num_parameters,
        "num_active_parameters": size_result.parameters.active,
        "parameters_by_component": _parameters_by_component(size_result),
        "flops": {
            "total": flops.total_visible,
            "per_token": flops.per_token_visible,
            "visible_by_component": flops.visible,
        },
        "memory": {
            "total_bytes": memory.total_bytes,
            "peak_by_component": peak_by_component,
            "peak_details": _components_by_group(memory.peak_by_component),
            "peak_phase": memory.peak_phase,
        },
        "fits": size_result.fits,
        "bounds": [_bound_to_dict(bound) for bound in _roofline_bounds(size_result)],
    }


def _components_by_group(peak_by_component: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the memory components that each bar of the page combines, with their bytes."""
    groups: dict[str, dict[str, int]] = {}
    for component, num_bytes in peak_by_component.items():
        groups.setdefault(component_group(component), {})[component] = num_bytes
    return groups


def _parameters_by_component(size_result: SizeEstimate) -> dict[str, int]:
    counts = size_result.parameters
    layers = counts.unique_layers
    parts = {
        "embedding": counts.embedding + counts.positions + counts.token_types + counts.embedding_projection,
        "attention": sum(layer.attention + layer.cross_attention for layer in layers),
        "ffn": sum(layer.ffn for layer in layers),
        "norms": sum(layer.norm for layer in layers) + counts.embedding_norm + counts.final_norm,
        "head": counts.head + counts.head_transform + counts.pooler,
    }
    return {name: count for name, count in parts.items() if count}


def _roofline_bounds(size_result: SizeEstimate) -> list[RooflineBound]:
    """Return the roofline bound of a training step, or the bounds of prefill and decode."""
    bounds = [size_result.train_time]
    if size_result.options.mode != "train":
        is_encoder = isinstance(size_result.options.config, Encoder)
        bounds = [size_result.prefill_time, None if is_encoder else size_result.decode_time]
    return [bound for bound in bounds if bound is not None]


def _bound_to_dict(bound: RooflineBound) -> dict[str, object]:
    slow, fast = bound.expected_seconds_high, bound.expected_seconds_low
    return {name: getattr(bound, name) for name in BOUND_FIELDS} | {
        "mfu": bound.compute_seconds / bound.min_seconds,
        "expected_tokens_per_second": [bound.num_tokens / slow, bound.num_tokens / fast],
    }


class MemoryFit(SizeQuery):
    """Maximum context and maximum batch size that fit in the device's memory, with the other options fixed."""

    model: ModelShape = ModelShape()

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        estimate = self.compute_size(self.model.resolve_config(inspector))
        options, device = estimate.options, estimate.options.hardware
        if device is None or device.memory is None:
            return QueryResult({"max_context": None, "max_batch_size": None, "has_memory_size": False})
        memory_bytes = int(device.memory)
        job.check_cancelled()
        limit = max_position_embeddings(options, source_follows_context=True)
        max_context = min(limit or SEARCH_LIMIT, SEARCH_LIMIT)
        context = find_max_context(options, memory_bytes, max_context, source_follows_context=True)
        job.check_cancelled()

        def total_bytes(batch_size: int) -> int:
            return SizeEstimate(replace(options, batch_size=batch_size)).memory.total_bytes

        batch = find_max_fitting(total_bytes, memory_bytes, SEARCH_LIMIT)
        data = {
            "has_memory_size": True,
            "max_context": context,
            "max_batch_size": batch,
            "unbounded_context": context == SEARCH_LIMIT,
            "unbounded_batch_size": batch == SEARCH_LIMIT,
            "config_context": options.config.context,
            "max_position_embeddings": limit,
        }
        return QueryResult(data)


class SizeCatalog(Query):
    """Presets, devices and dtypes that can be selected for the size queries."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        data = {"loaded_model": LOADED_MODEL, "presets": list(presets()), "dtypes": list(PRECISIONS)}
        return QueryResult(data | {"devices": [_device_to_dict(device) for device in list_hardware()]})


def _device_to_dict(device: Hardware) -> dict[str, object]:
    flops = {}
    for dtype in PRECISIONS:
        with suppress(InputError):  # the device does not support the dtype
            device.compute_dtype(dtype)
            flops[dtype] = device.peak_flops(dtype)
    return {name: getattr(device, name) for name in DEVICE_FIELDS} | {"flops": flops}
