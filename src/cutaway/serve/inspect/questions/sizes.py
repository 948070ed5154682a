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
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.question import Question
from cutaway.serve.inspect.wire import Answer
from cutaway.size import Size, known, size
from cutaway.size.fit import MOST, largest, longest_context, position_limit
from cutaway.size.numbers import NUMBERS
from cutaway.size.plot import grouped
from cutaway.size.roofline import Bound

OWN = "this model"
"""The one that is open; every other name is a preset's. No name is a path."""

Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
CHANGES = ("layers", "d_model", "heads", "kv_heads", "hidden", "vocab_size")


class Shape(BaseModel):
    """A model to begin with, and what of it is another number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: Annotated[str, Field(max_length=100)] = OWN
    layers: Annotated[int, Field(strict=True, ge=1, le=512)] | None = None
    d_model: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    hidden: Count | None = None
    vocab_size: Count | None = None

    def config(self, of: Inspector) -> Config:
        """Refused by the sentence of `ct.config` where it cannot be."""
        if self.base != OWN and self.base not in PRESETS:
            raise InputError(f"'{self.base[:40]}' is no preset; choose one of the list")
        start = of.config if self.base == OWN else read_config(self.base)
        changes = {name: value for name in CHANGES if (value := getattr(self, name)) is not None}
        return changed(start, changes) if changes else start


def changed(start: Config, changes: dict[str, int]) -> Config:
    """The configuration with other numbers in every stack and block that has them."""
    data = to_dict(start)
    for name in ("d_model", "vocab_size"):
        if name in changes:
            data[name] = changes[name]
    for side in start.stacks:
        stack = data[side]
        if "layers" in changes:
            stack["layers"] = changes["layers"]
        for block in [*stack["block"], *stack.get("lead", ())]:
            for attention in (block["attention"], *([block["cross"]] if "cross" in block else [])):
                attention |= {name: changes[name] for name in ("heads", "kv_heads") if takes(attention, name, changes)}
            ffn = block["ffn"]
            if "hidden" in changes:
                (ffn["expert"] if ffn["kind"] == "moe" else ffn)["hidden"] = changes["hidden"]
    return read_config(data)


def takes(attention: dict[str, Any], name: str, changes: dict[str, int]) -> bool:
    """Latent attention has no key heads to share."""
    return name in changes and not (name == "kv_heads" and attention["kind"] == "latent")


def shape_of(config: Config) -> dict[str, int | None]:
    """Where its sliders stand; None where there is none."""
    stack = list(config.stacks.values())[-1]
    block = stack.blocks[-1]
    ffn: Any = block.ffn
    expert = ffn.expert if ffn.kind == "moe" else ffn
    return {
        "layers": stack.layers,
        "d_model": config.d_model,
        "heads": block.attention.heads,
        "kv_heads": getattr(block.attention, "n_kv_heads", None),
        "hidden": expert.hidden_width(config.d_model),
        "vocab_size": config.vocab_size,
        "context": config.context,
    }


class Asked(Question):
    """What is asked of each model alike."""

    batch: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    context: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    dtype: Annotated[str, Field(max_length=20)] | None = None
    mode: Literal["infer", "train"] = "infer"
    hardware: Annotated[str, Field(max_length=60)] | None = None

    def sized(self, config: Config) -> Size:
        names = {device.name for device in known()}
        if self.hardware is not None and self.hardware not in names:
            raise InputError(f"no device called '{self.hardware[:40]}' is known; choose one of the list")
        return size(
            config, batch=self.batch, context=self.context, dtype=self.dtype, mode=self.mode, hardware=self.hardware
        )


class Sizes(Asked):
    """Parameters, FLOPs, memory by part and the roofline, of up to four models; one that cannot be says why."""

    models: Annotated[tuple[Shape, ...], Field(min_length=1, max_length=4)] = (Shape(),)

    def answer(self, of: Inspector, job: Job) -> Answer:
        told = [self.told(each, of) for each in self.models]
        contexts = {each["context"] for each in told if "context" in each}
        if len(contexts) > 1:  # unasked, each has its own; side by side, the shortest counts for all
            alike = self.model_copy(update={"context": min(contexts)})
            told = [alike.told(each, of) for each in self.models]
        return Answer({"models": told})

    def told(self, shape: Shape, of: Inspector) -> dict[str, Any]:
        try:
            config = shape.config(of)
            return {"base": shape.base, "start": shape_of(Shape(base=shape.base).config(of))} | costs(
                self.sized(config)
            )
        except CutawayError as error:
            return {"base": shape.base, "error": str(error)}


def costs(found: Size) -> dict[str, Any]:
    asked, memory = found.question, found.memory
    drawn = {name: size for name, size in grouped(memory.parts).items() if size}
    return {
        "shape": shape_of(asked.config),
        "context": asked.context,
        "dtype": asked.dtype.name,
        "beyond": asked.beyond or None,
        "params": found.params,
        "active": found.parameters.active,
        "parts": parameters_by_part(found),
        "flops": {"total": found.flops.total_seen, "per_token": found.flops.per_token_seen, "parts": found.flops.seen},
        "memory": {"total": memory.total, "parts": drawn, "fullest": memory.fullest},
        "fits": found.fits,
        "bounds": [bound(each) for each in bounds(found)],
    }


def parameters_by_part(found: Size) -> dict[str, int]:
    of = found.parameters
    parts = {
        "embedding": of.embedding + of.positions + of.types + of.embedding_projection,
        "attention": sum(layer.attention + layer.cross for layer in of.layers),
        "ffn": sum(layer.ffn for layer in of.layers),
        "norms": sum(layer.norm for layer in of.layers) + of.embedding_norm + of.final_norm,
        "head": of.head + of.head_transform + of.pooler,
    }
    return {name: count for name, count in parts.items() if count}


def bounds(found: Size) -> list[Bound]:
    """What is drawn on the roofline: a step of training; or reading prompts, and decoding."""
    if found.question.mode == "train":
        every = [found.train_time]
    else:
        every = [found.prefill_time, None if isinstance(found.question.config, Encoder) else found.decode_time]
    return [each for each in every if each is not None]


def bound(of: Bound) -> dict[str, Any]:
    return {
        "name": of.name,
        "seconds": of.seconds,
        "binds": of.binds,
        "intensity": of.intensity,
        "ridge": of.ridge,
        "share_of_peak": of.compute / of.seconds,
        "tokens_per_second": of.tokens_per_second,
        "expected": [of.tokens / of.slowest, of.tokens / of.fastest],
    }


class Fits(Asked):
    """The longest context and the largest batch that a device holds, all else as asked."""

    model: Shape = Shape()

    def answer(self, of: Inspector, job: Job) -> Answer:
        found = self.sized(self.model.config(of))
        asked, device = found.question, found.question.hardware
        if device is None or device.memory is None:
            return Answer({"longest_context": None, "largest_batch": None, "known": False})
        room = int(device.memory)
        job.check()
        limit = position_limit(asked, source_follows=True)
        context = longest_context(asked, room, min(limit or MOST, MOST), source_follows=True)
        job.check()
        batch = largest(lambda many: Size(replace(asked, batch=many)).memory.total, room, MOST)
        return Answer(
            {
                "known": True,
                "longest_context": context,
                "largest_batch": batch,
                "unbounded_context": context == MOST,
                "unbounded_batch": batch == MOST,
                "made_for": asked.config.context,
                "position_limit": limit,
            }
        )


class Choices(Question):
    """What sliders and lists offer: presets, devices, kinds of numbers."""

    def answer(self, of: Inspector, job: Job) -> Answer:
        devices = [
            {
                "name": each.name,
                "title": each.title,
                "kind": each.kind,
                "memory": each.memory,
                "bandwidth": each.bandwidth,
                "flops": {dtype: each.rate(dtype) for dtype in NUMBERS if has_rate(each, dtype)},
            }
            for each in known()
        ]
        return Answer({"own": OWN, "presets": list(presets()), "devices": devices, "dtypes": list(NUMBERS)})


def has_rate(device: Any, dtype: str) -> bool:
    try:
        device.computes_in(dtype)
    except InputError:
        return False
    return True
