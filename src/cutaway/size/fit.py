"""What fits: the longest context, the largest batch, and the shapes of a family, within a given memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from cutaway.config.positions import Learned, Sinusoidal
from cutaway.config.transformer import Config, EncoderDecoder, Form
from cutaway.errors import InputError
from cutaway.size.describe import question as described
from cutaway.size.question import Question
from cutaway.size.shapes import FAMILIES, Shape, family, shapes_around
from cutaway.size.sizing import Size, size
from cutaway.size.units import parse_bytes

Source = Config | Mapping[str, Any] | str | Path

MOST = 2**24
"""Where the search for a context or a batch ends."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The answers. A family's name has shapes only: it is not one model, so the rest is None."""

    budget: int
    """Bytes on one device."""
    question: Question
    family: str | None = None
    total: int | None = None
    """Bytes that the source takes as asked."""
    fits: bool | None = None
    longest_context: int | None = None
    """At the asked batch; None if not even one token fits."""
    beyond_context: bool = False
    """The longest context is more than the model is meant for."""
    unbounded: bool = False
    """The longest context is where the search ended: longer ones may fit, and do where windows bound the memory."""
    position_limit: int | None = None
    """The longest context that the model's table of positions allows."""
    largest_batch: int | None = None
    """At the asked context, over all devices together; None if not even one sequence a device fits."""
    unbounded_batch: bool = False
    """The largest batch is where the search ended: without a cache to keep, sequences are read one after another."""
    shapes: tuple[Shape, ...] = ()
    """By layers and then width: from about an eighth of the memory to just beyond it."""
    note: str = ""
    """What a reader of the shapes should know."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return vars(self) | {
            "question": described(Size(self.question)),
            "shapes": [asdict(shape) for shape in self.shapes],
        }


def fit(
    memory: int | float | str,
    source: Source,
    *,
    batch: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    mode: str = "infer",
    **more: Any,
) -> Fit:
    """What fits in `memory` bytes on each device; the rest is asked as of `size`.

    `source` may also be the name of a family of shapes: 'classic' (GPT's) or 'llama'.
    """
    budget = parse_bytes(memory)
    name = source if isinstance(source, str) and source in FAMILIES else None
    read = source if name is None else family(name, context)
    answer = size(read, batch=batch, context=context, dtype=dtype, mode=mode, **more)
    asked = answer.question
    follows = more.get("source_length") is None
    limit = position_limit(asked, follows)
    shapes, note = shapes_around(asked, budget)
    if name is not None:
        return Fit(budget=budget, question=asked, family=name, shapes=shapes, note=note)
    step, most = answer.replicas, max(1, MOST // answer.replicas)
    longest = longest_context(asked, budget, min(limit or MOST, MOST), follows)
    batches = largest(lambda n: Size(replace(asked, batch=n * step)).memory.total, budget, most)
    return Fit(
        budget=budget,
        question=asked,
        total=answer.memory.total,
        fits=answer.memory.total <= budget,
        longest_context=longest,
        beyond_context=longest is not None and longest > (asked.config.context or longest),
        unbounded=longest == MOST,
        position_limit=limit,
        largest_batch=None if batches is None else batches * step,
        unbounded_batch=batches == most,
        shapes=shapes,
        note=note,
    )


def compare(sources: Iterable[Source], **question: Any) -> list[Size]:
    """The same question of several models; of the shortest context that any would be asked about, unless given."""
    if isinstance(sources, str | Path | Mapping | Form):
        raise InputError("compare takes several models; give a list of them")
    every = [size(source, **question) for source in sources]
    if not every:
        raise InputError("there is nothing to compare; give one model or more")
    alike = min(each.question.context for each in every)
    return [
        each if each.question.context == alike else size(each.question.config, **question | {"context": alike})
        for each in every
    ]


# ---------------------------------------------------------------------------------------- contexts and batches


def position_limit(asked: Question, source_follows: bool) -> int | None:
    """The longest context that the tables of positions have rows for; a question beyond them is refused."""
    config = asked.config
    limits = []
    for name, stack in config.stacks.items():
        match stack.embedding.position:
            case Learned(length=rows) | Sinusoidal(table=int(rows)):
                of_source = isinstance(config, EncoderDecoder) and name == "encoder"
                tokens = asked.source if of_source else asked.context
                if tokens > rows:
                    what = "source_length" if of_source and not source_follows else "context"
                    raise InputError(
                        f"{what} is {tokens}, but the {name}'s table of positions ends at {rows}; give {rows} or less"
                    )
                if not of_source or source_follows:
                    limits.append(rows)
    return min(limits, default=None)


def longest_context(asked: Question, budget: int, most: int, source_follows: bool) -> int | None:
    """All else as asked; the source's length goes with the context unless it was given."""

    def needed(context: int) -> int:
        source = context if source_follows else asked.source
        return Size(replace(asked, context=context, source=source)).memory.total

    return largest(needed, budget, most)


def largest(total: Callable[[int], int], budget: int, most: int) -> int | None:
    """The largest n from 1 to `most` with total(n) ≤ budget, where totals never fall; None if there is none.

    Totals are lines with few bends, so a line through the last two points mostly leads to the answer in a few steps;
    every third step halves what is left (of its logarithm), whatever the line says.
    """
    before = 1, total(1)
    if before[1] > budget:
        return None
    here = most, total(most)
    if here[1] <= budget:
        return most
    low, high, step = 1, most, 0
    while high - low > 1:
        step += 1
        run, rise = here[0] - before[0], here[1] - before[1]
        guess = before[0] + (budget - before[1]) * run // rise if rise else 0
        if step % 3 == 0 or not low <= guess <= high:
            guess = isqrt(low * high)
        guess = min(max(guess, low + 1), high - 1)
        before, here = here, (guess, total(guess))
        low, high = (guess, high) if here[1] <= budget else (low, guess)
    return low
