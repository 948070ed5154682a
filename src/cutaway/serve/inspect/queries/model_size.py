"""Queries: parameters, FLOPs, memory and roofline of model shapes (`ct.size`)."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.config.presets import PRESETS, presets
from cutaway.config.transformer import Encoder
from cutaway.errors import CutawayError, InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import Query
from cutaway.size import Hardware, SizeEstimate, list_hardware, size
from cutaway.size.memory_fit import SEARCH_LIMIT, find_max_context, find_max_fitting, max_position_embeddings
from cutaway.size.plot import group_components
from cutaway.size.precision import PRECISIONS
from cutaway.size.roofline import RooflineBound

LOADED_MODEL = "this model"
"""Name of the inspected model; other names are presets, never paths."""

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
OVERRIDE_FIELDS = ("layers", "d_model", "heads", "kv_heads", "hidden", "vocab_size")


class ModelShape(BaseModel):
    """A base model and the config fields to override."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[str, Field(max_length=100)] = LOADED_MODEL
    layers: Annotated[int, Field(strict=True, ge=1, le=512)] | None = None
    d_model: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    hidden: Count | None = None
    vocab_size: Count | None = None

    def resolve_config(self, inspector: Inspector) -> Config:
        """Return the config with the overrides; invalid combinations raise the errors of `ct.config`."""
        if self.base != LOADED_MODEL and self.base not in PRESETS:
            raise InputError(f"'{self.base[:40]}' is not a preset; choose one of the list")
        base_config = inspector.config if self.base == LOADED_MODEL else read_config(self.base)
        changes = {name: value for name in OVERRIDE_FIELDS if (value := getattr(self, name)) is not None}
        return apply_overrides(base_config, changes) if changes else base_config


def apply_overrides(base_config: Config, overrides: dict[str, int]) -> Config:
    """Override fields in every stack and block that has them."""
    data = to_dict(base_config)
    for name in ("d_model", "vocab_size"):
        if name in overrides:
            data[name] = overrides[name]
    for side in base_config.stacks:
        stack = data[side]
        if "layers" in overrides:
            stack["layers"] = overrides["layers"]
        for block in [*stack["block"], *stack.get("leading_blocks", ())]:
            for attention in (block["attention"], *([block["cross"]] if "cross" in block else [])):
                attention |= {
                    name: overrides[name]
                    for name in ("heads", "kv_heads")
                    if _accepts_override(attention, name, overrides)
                }
            ffn = block["ffn"]
            if "hidden" in overrides:
                (ffn["expert"] if ffn["kind"] == "moe" else ffn)["hidden"] = overrides["hidden"]
    return read_config(data)


def _accepts_override(attention: dict[str, Any], name: str, overrides: dict[str, int]) -> bool:
    """Return whether a field applies; latent attention has no kv_heads."""
    return name in overrides and not (name == "kv_heads" and attention["kind"] == "latent")


def get_shape(config: Config) -> dict[str, int | None]:
    """Return the values of the overridable fields; None for fields that the model does not have."""
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    ffn: Any = block.ffn
    expert = ffn.expert if ffn.kind == "moe" else ffn
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
    """Options shared by the size queries."""

    batch_size: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    context: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    dtype: Annotated[str, Field(max_length=20)] | None = None
    mode: Literal["infer", "train"] = "infer"
    hardware: Annotated[str, Field(max_length=60)] | None = None

    def compute_size(self, config: Config) -> SizeEstimate:
        names = {device.name for device in list_hardware()}
        if self.hardware is not None and self.hardware not in names:
            raise InputError(f"'{self.hardware[:40]}' is not a known device; choose one of the list")
        return size(
            config,
            batch_size=self.batch_size,
            context=self.context,
            dtype=self.dtype,
            mode=self.mode,
            hardware=self.hardware,
        )


class ModelSizes(SizeQuery):
    """Parameters, FLOPs, memory by component and roofline of up to four models; an invalid one has an error message."""

    models: Annotated[tuple[ModelShape, ...], Field(min_length=1, max_length=4)] = (ModelShape(),)

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        descriptions = [self.describe_model(shape, inspector) for shape in self.models]
        contexts = {description["context"] for description in descriptions if "context" in description}
        if len(contexts) > 1:  # default contexts differ between models; compare at the shortest
            shared = self.model_copy(update={"context": min(contexts)})
            descriptions = [shared.describe_model(shape, inspector) for shape in self.models]
        return QueryResult({"models": descriptions})

    def describe_model(self, shape: ModelShape, inspector: Inspector) -> dict[str, Any]:
        try:
            config = shape.resolve_config(inspector)
            return {
                "base": shape.base,
                "base_shape": get_shape(ModelShape(base=shape.base).resolve_config(inspector)),
            } | _size_to_dict(self.compute_size(config))
        except CutawayError as error:
            return {"base": shape.base, "error": str(error)}


def _size_to_dict(size_result: SizeEstimate) -> dict[str, Any]:
    options, memory = size_result.options, size_result.memory
    peak_by_component = {name: size for name, size in group_components(memory.peak_by_component).items() if size}
    return {
        "shape": get_shape(options.config),
        "context": options.context,
        "dtype": options.precision.name,
        "context_warning": options.context_warning or None,
        "num_parameters": size_result.num_parameters,
        "num_active_parameters": size_result.parameters.active,
        "parameters_by_component": _parameters_by_component(size_result),
        "flops": {
            "total": size_result.flops.total_visible,
            "per_token": size_result.flops.per_token_visible,
            "visible_by_component": size_result.flops.visible,
        },
        "memory": {
            "total_bytes": memory.total_bytes,
            "peak_by_component": peak_by_component,
            "peak_phase": memory.peak_phase,
        },
        "fits": size_result.fits,
        "bounds": [_bound_to_dict(bound) for bound in _roofline_bounds(size_result)],
    }


def _parameters_by_component(size_result: SizeEstimate) -> dict[str, int]:
    parameters = size_result.parameters
    parts = {
        "embedding": parameters.embedding
        + parameters.positions
        + parameters.token_types
        + parameters.embedding_projection,
        "attention": sum(layer.attention + layer.cross_attention for layer in parameters.unique_layers),
        "ffn": sum(layer.ffn for layer in parameters.unique_layers),
        "norms": sum(layer.norm for layer in parameters.unique_layers)
        + parameters.embedding_norm
        + parameters.final_norm,
        "head": parameters.head + parameters.head_transform + parameters.pooler,
    }
    return {name: count for name, count in parts.items() if count}


def _roofline_bounds(size_result: SizeEstimate) -> list[RooflineBound]:
    """Return the bounds of a training step, or of prefill and decode."""
    if size_result.options.mode == "train":
        bounds = [size_result.train_time]
    else:
        bounds = [
            size_result.prefill_time,
            None if isinstance(size_result.options.config, Encoder) else size_result.decode_time,
        ]
    return [bound for bound in bounds if bound is not None]


def _bound_to_dict(roofline_bound: RooflineBound) -> dict[str, Any]:
    return {
        "name": roofline_bound.name,
        "min_seconds": roofline_bound.min_seconds,
        "bottleneck": roofline_bound.bottleneck,
        "arithmetic_intensity": roofline_bound.arithmetic_intensity,
        "ridge_point": roofline_bound.ridge_point,
        "mfu": roofline_bound.compute_seconds / roofline_bound.min_seconds,
        "max_tokens_per_second": roofline_bound.max_tokens_per_second,
        "expected_tokens_per_second": [
            roofline_bound.num_tokens / roofline_bound.expected_seconds_high,
            roofline_bound.num_tokens / roofline_bound.expected_seconds_low,
        ],
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
        context = find_max_context(
            options, memory_bytes, min(limit or SEARCH_LIMIT, SEARCH_LIMIT), source_follows_context=True
        )
        job.check_cancelled()
        batch = find_max_fitting(
            lambda batch_size: SizeEstimate(replace(options, batch_size=batch_size)).memory.total_bytes,
            memory_bytes,
            SEARCH_LIMIT,
        )
        return QueryResult(
            {
                "has_memory_size": True,
                "max_context": context,
                "max_batch_size": batch,
                "unbounded_context": context == SEARCH_LIMIT,
                "unbounded_batch_size": batch == SEARCH_LIMIT,
                "config_context": options.config.context,
                "max_position_embeddings": limit,
            }
        )


class SizeCatalog(Query):
    """Presets, devices and dtypes that can be selected."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        devices = [
            {
                "name": device.name,
                "title": device.title,
                "kind": device.kind,
                "memory": device.memory,
                "bandwidth": device.bandwidth,
                "flops": {dtype: device.peak_flops(dtype) for dtype in PRECISIONS if _supports_dtype(device, dtype)},
            }
            for device in list_hardware()
        ]
        return QueryResult(
            {"loaded_model": LOADED_MODEL, "presets": list(presets()), "devices": devices, "dtypes": list(PRECISIONS)}
        )


def _supports_dtype(device: Hardware, dtype: str) -> bool:
    try:
        device.compute_dtype(dtype)
    except InputError:
        return False
    return True
