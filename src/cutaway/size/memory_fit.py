"""What fits: the longest context, the largest batch, and the shapes of a family, within a given memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from cutaway.config.positions import LearnedPosition, SinusoidalPosition
from cutaway.config.transformer import Config, EncoderDecoder, TransformerConfig
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate, options_to_dict, size
from cutaway.size.model_scaling import SCALING_FAMILIES, ModelShape, build_family_config, list_shapes_near_budget
from cutaway.size.options import SizeOptions
from cutaway.size.units import parse_bytes

ConfigSource = Config | Mapping[str, Any] | str | Path

SEARCH_LIMIT = 2**24
"""Where the search for a context or a batch ends."""


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """The answers. A family's name has shapes only: it is not one model, so the rest is None."""

    memory_budget: int
    """Bytes on one device."""
    options: SizeOptions
    family: str | None = None
    total_bytes: int | None = None
    """Bytes that the source takes as asked."""
    fits: bool | None = None
    max_context: int | None = None
    """At the asked batch; None if not even one token fits."""
    exceeds_model_context: bool = False
    """The longest context is more than the model is meant for."""
    unbounded_context: bool = False
    """The longest context is where the search ended: longer ones may fit, and do where windows bound the memory."""
    max_position_embeddings: int | None = None
    """The longest context that the model's table of positions allows."""
    max_batch_size: int | None = None
    """At the asked context, over all devices together; None if not even one sequence a device fits."""
    unbounded_batch_size: bool = False
    """The largest batch is where the search ended: without a cache to keep, sequences are read one after another."""
    model_shapes: tuple[ModelShape, ...] = ()
    """By layers and then width: from about an eighth of the memory to just beyond it."""
    note: str = ""
    """What a reader of the shapes should know."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return vars(self) | {
            "options": options_to_dict(SizeEstimate(self.options)),
            "model_shapes": [asdict(shape) for shape in self.model_shapes],
        }


def fit_to_memory(
    memory: int | float | str,
    source: ConfigSource,
    *,
    batch_size: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    mode: str = "infer",
    **options: Any,
) -> MemoryFit:
    """What fits in `memory` bytes on each device; the rest is asked as of `size`.

    `source` may also be the name of a family of shapes: 'classic' (GPT's) or 'llama'.
    """
    budget = parse_bytes(memory)
    name = source if isinstance(source, str) and source in SCALING_FAMILIES else None
    read = source if name is None else build_family_config(name, context)
    answer = size(read, batch_size=batch_size, context=context, dtype=dtype, mode=mode, **options)
    asked = answer.options
    follows = options.get("source_len") is None
    limit = max_position_embeddings(asked, follows)
    shapes, note = list_shapes_near_budget(asked, budget)
    if name is not None:
        return MemoryFit(memory_budget=budget, options=asked, family=name, model_shapes=shapes, note=note)
    step, most = answer.dp_size, max(1, SEARCH_LIMIT // answer.dp_size)
    longest = find_max_context(asked, budget, min(limit or SEARCH_LIMIT, SEARCH_LIMIT), follows)
    batches = find_max_fitting(
        lambda n: SizeEstimate(replace(asked, batch_size=n * step)).memory.total_bytes, budget, most
    )
    return MemoryFit(
        memory_budget=budget,
        options=asked,
        total_bytes=answer.memory.total_bytes,
        fits=answer.memory.total_bytes <= budget,
        max_context=longest,
        exceeds_model_context=longest is not None and longest > (asked.config.context or longest),
        unbounded_context=longest == SEARCH_LIMIT,
        max_position_embeddings=limit,
        max_batch_size=None if batches is None else batches * step,
        unbounded_batch_size=batches == most,
        model_shapes=shapes,
        note=note,
    )


def compare_models(sources: Iterable[ConfigSource], **options: Any) -> list[SizeEstimate]:
    """The same question of several models; of the shortest context that any would be asked about, unless given."""
    if isinstance(sources, str | Path | Mapping | TransformerConfig):
        raise InputError("compare takes several models; give a list of them")
    every = [size(source, **options) for source in sources]
    if not every:
        raise InputError("there is nothing to compare; give one model or more")
    alike = min(each.options.context for each in every)
    return [
        each if each.options.context == alike else size(each.options.config, **options | {"context": alike})
        for each in every
    ]


# ---------------------------------------------------------------------------------------- contexts and batches


def max_position_embeddings(options: SizeOptions, source_follows_context: bool) -> int | None:
    """The longest context that the tables of positions have rows for; a question beyond them is refused."""
    config = options.config
    limits = []
    for name, stack in config.stacks.items():
        match stack.embedding.position:
            case LearnedPosition(length=rows) | SinusoidalPosition(table_length=int(rows)):
                of_source = isinstance(config, EncoderDecoder) and name == "encoder"
                tokens = options.source_len if of_source else options.context
                if tokens > rows:
                    what = "source_len" if of_source and not source_follows_context else "context"
                    raise InputError(
                        f"{what} is {tokens}, but the {name}'s table of positions ends at {rows}; give {rows} or less"
                    )
                if not of_source or source_follows_context:
                    limits.append(rows)
    return min(limits, default=None)


def find_max_context(options: SizeOptions, memory_budget: int, limit: int, source_follows_context: bool) -> int | None:
    """All else as asked; the source's length goes with the context unless it was given."""

    def needed(context: int) -> int:
        source = context if source_follows_context else options.source_len
        return SizeEstimate(replace(options, context=context, source_len=source)).memory.total_bytes

    return find_max_fitting(needed, memory_budget, limit)


def find_max_fitting(total_bytes: Callable[[int], int], memory_budget: int, limit: int) -> int | None:
    """The largest n from 1 to `limit` with total_bytes(n) ≤ memory_budget, for totals that never fall; None if none.

    Totals are lines with few bends, so a line through the last two points mostly leads to the answer in a few steps;
    every third step halves what is left (of its logarithm), whatever the line says.
    """
    before = 1, total_bytes(1)
    if before[1] > memory_budget:
        return None
    here = limit, total_bytes(limit)
    if here[1] <= memory_budget:
        return limit
    low, high, step = 1, limit, 0
    while high - low > 1:
        step += 1
        run, rise = here[0] - before[0], here[1] - before[1]
        guess = before[0] + (memory_budget - before[1]) * run // rise if rise else 0
        if step % 3 == 0 or not low <= guess <= high:
            guess = isqrt(low * high)
        guess = min(max(guess, low + 1), high - 1)
        before, here = here, (guess, total_bytes(guess))
        low, high = (guess, high) if here[1] <= memory_budget else (low, guess)
    return low
