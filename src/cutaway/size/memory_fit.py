"""Largest context, batch size and model shapes within a memory budget; comparison of models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from cutaway.config.positions import LearnedPosition, SinusoidalPosition
from cutaway.config.transformer import Config, EncoderDecoder, TransformerConfig
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate, size
from cutaway.size.estimate_json import options_to_dict
from cutaway.size.model_scaling import SCALING_FAMILIES, ModelShape, build_family_config, list_shapes_near_budget
from cutaway.size.options import SizeOptions
from cutaway.size.units import parse_bytes

_ConfigSource = Config | Mapping[str, object] | str | Path

SEARCH_LIMIT = 2**24
"""Upper limit of the search for a context length or a batch size."""


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Result of `fit_to_memory`. For a family only `model_shapes` is set: a family is not a single model."""

    memory_budget: int
    """Number of bytes per device."""
    options: SizeOptions
    family: str | None = None
    total_bytes: int | None = None
    """Peak memory of the source with the given options."""
    fits: bool | None = None
    max_context: int | None = None
    """Longest context at the given batch size; None if one token does not fit."""
    exceeds_model_context: bool = False
    """Whether `max_context` exceeds the context length of the configuration."""
    unbounded_context: bool = False
    """Whether `max_context` is the search limit: longer contexts may fit, as with sliding windows."""
    max_position_embeddings: int | None = None
    """Number of rows of the smallest position table that limits the context; None if no table limits it."""
    max_batch_size: int | None = None
    """Largest global batch size at the given context; None if one sequence per device does not fit."""
    unbounded_batch_size: bool = False
    """Whether `max_batch_size` is the search limit, as for encoders, which have no cache and run sequences in turn."""
    model_shapes: tuple[ModelShape, ...] = ()
    """Shapes sorted by layers and width, from about 1/8 of the budget to just beyond it."""
    note: str = ""
    """Remarks on the list of shapes."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict that can be written as JSON."""
        return vars(self) | {
            "options": options_to_dict(SizeEstimate(self.options)),
            "model_shapes": [asdict(shape) for shape in self.model_shapes],
        }


def fit_to_memory(
    memory: int | float | str, source: _ConfigSource, *, context: int | None = None, **options: object
) -> MemoryFit:
    """Find the longest context, the largest batch size and the model shapes that fit in `memory` bytes per device.

    The other arguments are those of `size`. `source` may also be a family of shapes: 'classic' (GPT) or 'llama'.
    """
    budget = parse_bytes(memory)
    family = source if isinstance(source, str) and source in SCALING_FAMILIES else None
    config_source = source if family is None else build_family_config(family, context)
    estimate = size(config_source, context=context, **options)  # type: ignore[arg-type]  # `size` validates them
    resolved = estimate.options
    source_follows = options.get("source_len") is None
    limit = max_position_embeddings(resolved, source_follows)
    shapes, note = list_shapes_near_budget(resolved, budget)
    if family is not None:
        return MemoryFit(memory_budget=budget, options=resolved, family=family, model_shapes=shapes, note=note)
    dp_size, max_steps = estimate.dp_size, max(1, SEARCH_LIMIT // estimate.dp_size)
    max_context = find_max_context(resolved, budget, min(limit or SEARCH_LIMIT, SEARCH_LIMIT), source_follows)
    max_batches = find_max_fitting(
        lambda n: SizeEstimate(replace(resolved, batch_size=n * dp_size)).memory.total_bytes, budget, max_steps
    )
    return MemoryFit(
        memory_budget=budget,
        options=resolved,
        total_bytes=estimate.memory.total_bytes,
        fits=estimate.memory.total_bytes <= budget,
        max_context=max_context,
        exceeds_model_context=max_context is not None and max_context > (resolved.config.context or max_context),
        unbounded_context=max_context == SEARCH_LIMIT,
        max_position_embeddings=limit,
        max_batch_size=None if max_batches is None else max_batches * dp_size,
        unbounded_batch_size=max_batches == max_steps,
        model_shapes=shapes,
        note=note,
    )


def compare_models(sources: Iterable[_ConfigSource], **options: object) -> list[SizeEstimate]:
    """Estimate several models with the same options; the default context is the smallest of their default contexts."""
    if isinstance(sources, str | Path | Mapping | TransformerConfig):
        raise InputError(f"sources is a single model ({type(sources).__name__}); pass a list of models")
    estimates = [size(source, **options) for source in sources]  # type: ignore[arg-type]  # `size` validates them
    if not estimates:
        raise InputError("sources is an empty list; pass at least one model to compare")
    options["context"] = min(estimate.options.context for estimate in estimates)
    return [
        size(estimate.options.config, **options | {"dtype": estimate.options.precision})  # type: ignore[arg-type]
        for estimate in estimates
    ]


# ---------------------------------------------------------------------------------------- context length and batch size


def max_position_embeddings(options: SizeOptions, source_follows_context: bool) -> int | None:
    """Number of rows of the smallest position table that limits the context; None if no table limits it.

    The table of source positions counts only with `source_follows_context`. Raises an error if `context` or
    `source_len` exceeds the number of rows of its table."""
    config = options.config
    limits = []
    for name, stack in config.stacks.items():
        match stack.embedding.position:
            case LearnedPosition(length=rows) | SinusoidalPosition(table_length=int(rows)):
                is_source = isinstance(config, EncoderDecoder) and name == "encoder"
                tokens = options.source_len if is_source else options.context
                if tokens > rows:
                    argument = "source_len" if is_source and not source_follows_context else "context"
                    raise InputError(
                        f"{argument} is {tokens}, but the {name}'s position table has {rows} rows; pass at most {rows}"
                    )
                if not is_source or source_follows_context:
                    limits.append(rows)
    return min(limits, default=None)


def find_max_context(options: SizeOptions, memory_budget: int, limit: int, source_follows_context: bool) -> int | None:
    """Longest context up to `limit` whose peak memory is within the budget; None if one token does not fit.

    With `source_follows_context`, the source length equals the context."""

    def total_bytes(context: int) -> int:
        source = context if source_follows_context else options.source_len
        return SizeEstimate(replace(options, context=context, source_len=source)).memory.total_bytes

    return find_max_fitting(total_bytes, memory_budget, limit)


def find_max_fitting(total_bytes: Callable[[int], int], memory_budget: int, limit: int) -> int | None:
    """Largest n in [1, limit] with total_bytes(n) ≤ memory_budget; None if there is no such n.

    total_bytes(n) must not decrease with n. It is nearly piecewise linear, so the secant method converges in a few
    steps. Every third step bisects the logarithm of n, which bounds the number of steps.
    """
    previous = 1, total_bytes(1)
    if previous[1] > memory_budget:
        return None
    current = limit, total_bytes(limit)
    if current[1] <= memory_budget:
        return limit
    low, high, step = 1, limit, 0
    while high - low > 1:
        step += 1
        run, rise = current[0] - previous[0], current[1] - previous[1]
        guess = previous[0] + (memory_budget - previous[1]) * run // rise if rise else 0
        if step % 3 == 0 or not low <= guess <= high:
            guess = isqrt(low * high)
        guess = min(max(guess, low + 1), high - 1)
        previous, current = current, (guess, total_bytes(guess))
        low, high = (guess, high) if current[1] <= memory_budget else (low, guess)
    return low
