"""What a model costs before it exists: `ct.size`, asked by sliders."""

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
"""The one that is open; every other name is a preset's. No name is a path."""

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
OVERRIDE_FIELDS = ("layers", "d_model", "heads", "kv_heads", "hidden", "vocab_size")


class ModelShape(BaseModel):
    """A model to begin with, and what of it is another number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[str, Field(max_length=100)] = LOADED_MODEL
    layers: Annotated[int, Field(strict=True, ge=1, le=512)] | None = None
    d_model: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    hidden: Count | None = None
    vocab_size: Count | None = None

    def resolve_config(self, inspector: Inspector) -> Config:
        """Refused by the sentence of `ct.config` where it cannot be."""
        if self.base != LOADED_MODEL and self.base not in PRESETS:
            raise InputError(f"'{self.base[:40]}' is no preset; choose one of the list")
        start = inspector.config if self.base == LOADED_MODEL else read_config(self.base)
        changes = {name: value for name in OVERRIDE_FIELDS if (value := getattr(self, name)) is not None}
        return apply_overrides(start, changes) if changes else start


def apply_overrides(base_config: Config, overrides: dict[str, int]) -> Config:
    """The configuration with other numbers in every stack and block that has them."""
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
    """Latent attention has no key heads to share."""
    return name in overrides and not (name == "kv_heads" and attention["kind"] == "latent")


def get_shape(config: Config) -> dict[str, int | None]:
    """Where its sliders stand; None where there is none."""
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
    """What is asked of each model alike."""

    batch_size: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    context: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    dtype: Annotated[str, Field(max_length=20)] | None = None
    mode: Literal["infer", "train"] = "infer"
    hardware: Annotated[str, Field(max_length=60)] | None = None

    def compute_size(self, config: Config) -> SizeEstimate:
        names = {device.name for device in list_hardware()}
        if self.hardware is not None and self.hardware not in names:
            raise InputError(f"no device called '{self.hardware[:40]}' is known; choose one of the list")
        return size(
            config,
            batch_size=self.batch_size,
            context=self.context,
            dtype=self.dtype,
            mode=self.mode,
            hardware=self.hardware,
        )


class ModelSizes(SizeQuery):
    """Parameters, FLOPs, memory by part and the roofline, of up to four models; one that cannot be says why."""

    models: Annotated[tuple[ModelShape, ...], Field(min_length=1, max_length=4)] = (ModelShape(),)

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        told = [self.describe_model(each, inspector) for each in self.models]
        contexts = {each["context"] for each in told if "context" in each}
        if len(contexts) > 1:  # unasked, each has its own; side by side, the shortest counts for all
            alike = self.model_copy(update={"context": min(contexts)})
            told = [alike.describe_model(each, inspector) for each in self.models]
        return QueryResult({"models": told})

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
    asked, memory = size_result.options, size_result.memory
    drawn = {name: size for name, size in group_components(memory.peak_by_component).items() if size}
    return {
        "shape": get_shape(asked.config),
        "context": asked.context,
        "dtype": asked.precision.name,
        "context_warning": asked.context_warning or None,
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
            "peak_by_component": drawn,
            "peak_phase": memory.peak_phase,
        },
        "fits": size_result.fits,
        "bounds": [_bound_to_dict(each) for each in _roofline_bounds(size_result)],
    }


def _parameters_by_component(size_result: SizeEstimate) -> dict[str, int]:
    of = size_result.parameters
    parts = {
        "embedding": of.embedding + of.positions + of.token_types + of.embedding_projection,
        "attention": sum(layer.attention + layer.cross_attention for layer in of.unique_layers),
        "ffn": sum(layer.ffn for layer in of.unique_layers),
        "norms": sum(layer.norm for layer in of.unique_layers) + of.embedding_norm + of.final_norm,
        "head": of.head + of.head_transform + of.pooler,
    }
    return {name: count for name, count in parts.items() if count}


def _roofline_bounds(size_result: SizeEstimate) -> list[RooflineBound]:
    """What is drawn on the roofline: a step of training; or reading prompts, and decoding."""
    if size_result.options.mode == "train":
        every = [size_result.train_time]
    else:
        every = [
            size_result.prefill_time,
            None if isinstance(size_result.options.config, Encoder) else size_result.decode_time,
        ]
    return [each for each in every if each is not None]


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
    """The longest context and the largest batch that a device holds, all else as asked."""

    model: ModelShape = ModelShape()

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        found = self.compute_size(self.model.resolve_config(inspector))
        asked, device = found.options, found.options.hardware
        if device is None or device.memory is None:
            return QueryResult({"max_context": None, "max_batch_size": None, "has_memory_size": False})
        room = int(device.memory)
        job.check_cancelled()
        limit = max_position_embeddings(asked, source_follows_context=True)
        context = find_max_context(asked, room, min(limit or SEARCH_LIMIT, SEARCH_LIMIT), source_follows_context=True)
        job.check_cancelled()
        batch = find_max_fitting(
            lambda many: SizeEstimate(replace(asked, batch_size=many)).memory.total_bytes, room, SEARCH_LIMIT
        )
        return QueryResult(
            {
                "has_memory_size": True,
                "max_context": context,
                "max_batch_size": batch,
                "unbounded_context": context == SEARCH_LIMIT,
                "unbounded_batch_size": batch == SEARCH_LIMIT,
                "config_context": asked.config.context,
                "max_position_embeddings": limit,
            }
        )


class SizeCatalog(Query):
    """What sliders and lists offer: presets, devices, kinds of numbers."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        devices = [
            {
                "name": each.name,
                "title": each.title,
                "kind": each.kind,
                "memory": each.memory,
                "bandwidth": each.bandwidth,
                "flops": {dtype: each.peak_flops(dtype) for dtype in PRECISIONS if _supports_dtype(each, dtype)},
            }
            for each in list_hardware()
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
