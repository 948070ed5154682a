"""Labels of classification data: their names, and the problem type that follows from them."""

from collections.abc import Iterable, Sequence
from typing import Any

from cutaway.config.head import ProblemType
from cutaway.errors import InputError
from cutaway.evaluate.label_set import LabelSet, are_multi_hot, as_number, label_name

MAX_LABELS = 10_000
"""Maximum number of classes. More are a sign of another column, or of regression."""


def discover_labels(labels: Iterable[tuple[str, Any]], problem_type: ProblemType | None = None) -> LabelSet:
    """Problem type and names of the labels of records, given as (location of the record, label).

    Strings and integers are classes, lists are several labels, and numbers with a fraction are targets of regression.
    Raises InputError if the labels have several types, or if there is only one class.
    """
    located = list(labels)
    first: dict[str, tuple[str, Any]] = {}
    for location, label in located:
        first.setdefault(_type_of(label), (location, label))
    if not first:
        raise InputError("no record has a label; set data.sources[].target_column to the column of the label")
    if "object" in first:
        location, label = first["object"]
        raise InputError(f"{location}: the label is {label!r:.60}; a label is a string, a number or a list")
    kinds = set(first)
    if "list" in kinds and len(kinds) > 1:
        raise _mixed_types(first, "list", next(iter(kinds - {"list"})))
    values = [label for _, label in located]
    if problem_type == "regression":
        return _regression(located)
    if "list" in kinds:
        if problem_type == "single_label_classification":
            location, label = first["list"]
            raise InputError(
                f"{location}: the label {label!r:.60} is a list, but objective.problem_type is {problem_type}; use one"
                " label per record, or problem_type = 'multi_label_classification'"
            )
        return _multi_label(values)
    if problem_type == "multi_label_classification":
        location, label = next(iter(first.values()))
        raise InputError(
            f"{location}: the label {label!r:.60} is not a list, but objective.problem_type is {problem_type}; write"
            " the labels of a record as a list"
        )
    if "fraction" in kinds and problem_type is None:
        if "text" in kinds:
            raise _mixed_types(first, "text", "fraction")
        return _regression(located)
    return LabelSet("single_label_classification", names := class_names(values), len(names))


def _type_of(label: object) -> str:
    if isinstance(label, list):
        return "list"
    if isinstance(label, bool):
        return "text"
    number = as_number(label)
    if number is None:
        return "text" if isinstance(label, str) else "object"
    # "5" and 5.0 are classes as well, because CSV and Parquet files with missing values have no integers.
    return "integer" if number == int(number) else "fraction"


def class_names(values: Sequence[object]) -> tuple[str, ...]:
    names = {label_name(value) for value in values}
    if len(names) < 2:
        raise InputError(
            f"all {len(values):,} labels are '{''.join(names)[:60]}', but a classifier needs at least two classes; add"
            " records of other classes, or set data.sources[].target_column to another column"
        )
    if len(names) > MAX_LABELS:
        raise InputError(
            f"the records have {len(names):,} different labels, e.g. '{min(names)[:40]}'; set"
            " data.sources[].target_column to the column of the class, or objective.problem_type = 'regression'"
        )
    return tuple(sorted(names, key=_sort_key))


def _sort_key(name: str) -> tuple[float, str]:
    """Numbers in their order, then other names in alphabetical order."""
    number = as_number(name)
    return (float("inf") if number is None else number, name)


def _multi_label(values: Sequence[list[Any]]) -> LabelSet:
    if are_multi_hot(values):
        names = tuple(str(index) for index in range(len(values[0])))
        return LabelSet("multi_label_classification", names, len(names), True)
    items = [item for value in values for item in value]
    if any(_type_of(item) not in ("text", "integer") for item in items):
        raise InputError(
            "the labels are lists of numbers with a fraction; set objective.problem_type = 'regression', or write the"
            " names of the labels of each record"
        )
    names = class_names(items)
    return LabelSet("multi_label_classification", names, len(names))


def _regression(located: Sequence[tuple[str, Any]]) -> LabelSet:
    width: int | None = None
    for location, label in located:
        values = label if isinstance(label, list) else [label]
        if any(as_number(value) is None for value in values) or not values:
            raise InputError(f"{location}: the label {label!r:.60} is not a number, but the objective is regression")
        width = len(values) if width is None else width
        if len(values) != width:
            raise InputError(f"{location}: the label has {len(values)} numbers, but the first one has {width}")
    return LabelSet("regression", (), width or 1)


def _mixed_types(first: dict[str, tuple[str, Any]], one: str, other: str) -> InputError:
    (place, label), (other_place, other_label) = first[one], first[other]
    return InputError(
        f"the labels have different types: {label!r:.40} ({place}) and {other_label!r:.40} ({other_place}); write all"
        " as names, all as numbers, or all as lists"
    )
