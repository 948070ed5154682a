"""Labels of a task head: names, and their numbers in the outputs of the head."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutaway.config.head import ProblemType, SequenceClassificationHead, TokenClassificationHead
from cutaway.errors import InputError


class LabelError(InputError):
    """A label that a head does not have: the kind of problem, and the detail of this label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}; use a label of the model, or train a head for it")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class LabelSet:
    """Problem type, and the names of the labels in the order of the outputs of the head."""

    problem_type: ProblemType
    names: tuple[str, ...]
    """Empty for regression."""
    num_labels: int
    is_multi_hot: bool = False
    """Labels of several classes are lists of 0 and 1 instead of lists of names."""

    def encode(self, label: object) -> NDArray[Any]:
        """Class index (1,), one value of 0 or 1 per label (L,), or targets of regression (L,).

        Raises LabelError if the label is unknown or has another type.
        """
        if self.problem_type == "regression":
            values = [as_number(each) for each in (label if isinstance(label, list) else [label])]
            if None in values or len(values) != self.num_labels:
                expected = "a number" if self.num_labels == 1 else f"a list of {self.num_labels} numbers"
                raise LabelError("invalid label", f"{label!r:.60} is not {expected}")
            return np.array(values, np.float32)
        if self.problem_type == "multi_label_classification":
            if not isinstance(label, list):
                raise LabelError("invalid label", f"{label!r:.60} is not a list of labels")
            if self.is_multi_hot and (len(label) != self.num_labels or any(each not in (0, 1) for each in label)):
                raise LabelError("invalid label", f"{label!r:.60} is not a list of {self.num_labels} zeros and ones")
            target = np.zeros(self.num_labels, np.float32)
            if self.is_multi_hot:
                target[:] = label
            else:
                target[[self._find(each) for each in label]] = 1
            return target
        if isinstance(label, list | dict):
            raise LabelError("invalid label", f"{label!r:.60} is a {type(label).__name__}, not one label")
        return np.array([self._find(label)], np.int64)

    def _find(self, label: object) -> int:
        name = label_name(label)
        if name in self.index_of:
            return self.index_of[name]
        index = as_number(label)
        # A head whose labels have names is trained with the numbers of the labels.
        if index is not None and index == int(index) and 0 <= index < len(self.names) and not self.has_number_names:
            return int(index)
        known = ", ".join(self.names[:5]) + (", …" if len(self.names) > 5 else "")
        raise LabelError("unknown label", f"'{name[:60]}' is not one of the {len(self.names)} labels {known}")

    def count(self, targets: Sequence[NDArray[Any]]) -> dict[str, int]:
        """Number of records with each label. Empty for regression."""
        if self.problem_type == "regression":
            return {}
        if self.problem_type == "single_label_classification":
            counts = Counter(int(target[0]) for target in targets)
        else:
            counts = Counter({index: int(number) for index, number in enumerate(np.sum(targets, 0))})
        return {name: counts[index] for index, name in enumerate(self.names)}

    def format(self, target: NDArray[Any]) -> str:
        """Name of a label, names of several labels, or numbers."""
        if self.problem_type == "regression":
            return ", ".join(f"{value:g}" for value in target)
        chosen = [int(target[0])] if self.problem_type == "single_label_classification" else np.flatnonzero(target)
        return ", ".join(self.names[index] for index in chosen) or "(none)"

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Name of a label → its number."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def has_number_names(self) -> bool:
        """Whether the names are numbers, such as the ratings 1 to 5."""
        return all(as_number(name) is not None for name in self.names)


def label_name(label: object) -> str:
    """Name of a class: the string, or the number as a string. A whole number has no fraction."""
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return str(label).lower() if isinstance(label, bool) else str(label).strip()


def label_set_of(head: SequenceClassificationHead | TokenClassificationHead, *, is_multi_hot: bool = False) -> LabelSet:
    """Labels of a head."""
    problem_type: ProblemType = "single_label_classification"
    if isinstance(head, SequenceClassificationHead):
        problem_type = head.problem_type
    names = () if problem_type == "regression" else head.label_names
    return LabelSet(problem_type, names, head.num_labels, is_multi_hot)


def are_multi_hot(values: Sequence[Any]) -> bool:
    """Whether labels are lists of 0 and 1 with one value for each class, instead of lists of classes.

    The lists have the same length, and at least one of them has a value twice.
    """
    if not values or not all(isinstance(value, list) for value in values) or len({len(value) for value in values}) > 1:
        return False
    is_binary = all(type(item) in (int, float, bool) and item in (0, 1) for value in values for item in value)
    return is_binary and any(len(set(value)) < len(value) for value in values)


def as_number(value: object) -> float | None:
    """The value as a finite number. None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None
