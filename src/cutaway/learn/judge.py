"""Whether what a learner wrote is right; if not, the first value that differs and the likely mistake by its name."""

import copy
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from cutaway.errors import first_line
from cutaway.learn.source import UNWRITTEN
from cutaway.learn.task import Case, Made, Table, Task, Tasks
from cutaway.learn.values import Told, alike, difference, told

State = Literal["right", "wrong", "unwritten", "missing", "failed"]
KNOWN = {
    "view size is not compatible": "after a transpose the numbers are not in order in memory: use reshape, or "
    "contiguous() before view",
    "shapes cannot be multiplied": "write the shapes beside the product: the last axis of the left is the last but one "
    "of the right",
    "must match the size of tensor": "write the shapes of both sides beside the line: one lacks an axis, or has two "
    "swapped",
    "is invalid for input of size": "the sizes that are asked for must multiply to as many numbers as there are",
    "Boolean value of Tensor": "a tensor of many truth values is neither true nor false: ask .any() or .all() of it",
}
"""What often is behind an error of torch, by a part of what it says."""


LEARNER = "learner"
"""The module that a learner's file becomes."""


class TooLongError(BaseException):
    """The learner's time is over. No Exception, so that an `except Exception` in a loop does not catch it."""


@dataclass(frozen=True)
class Verdict:
    """On one function or table."""

    name: str
    state: State
    said: str = ""
    mistakes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    at: str = ""
    """The learner's line that an error came from."""


@dataclass
class Places:
    """The learner's own files by the names that Python has for them: what line an error came from."""

    texts: Mapping[str, str] = field(default_factory=dict)

    def of(self, error: BaseException) -> str:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in self.texts]
        if not frames:
            return ""
        last = frames[-1]
        lines = self.texts[last.filename].splitlines()
        line = lines[last.lineno - 1].strip() if last.lineno and last.lineno <= len(lines) else ""
        return f"line {last.lineno} of {last.filename}: {line}"


def prepare(tasks: Tasks) -> None:
    """Compute what is right before anything of the learner's is run."""
    for task in tasks:
        if isinstance(task, Task):
            for n in range(len(task.cases)):
                crooked(task, Made(), n)


def judge(tasks: Tasks, written: Mapping[str, Any], places: Places) -> list[Verdict]:
    """Everything that was asked for, one after another."""
    return [
        of_table(task, written) if isinstance(task, Table) else of_function(task, written, places) for task in tasks
    ]


def of_function(task: Task, written: Mapping[str, Any], places: Places) -> Verdict:
    function = written.get(task.name)
    if function is None:
        return Verdict(task.name, "missing", "is not there: the stub has it; was it renamed?")
    if not callable(function):
        return Verdict(task.name, "missing", f"is {told(function).name}, where a function was asked")
    asked = [crooked(task, Made(), n) for n in range(len(task.cases))]
    given: list[Told] = []
    first: Verdict | None = None
    for case, right in zip(task.cases, asked, strict=True):
        value, verdict = tried(task, function, case, right, places)
        given.append(value)
        first = first or verdict
        if verdict is not None and verdict.state in ("unwritten", "missing"):
            return verdict
    if first is None:
        return Verdict(task.name, "right")
    found = likely(task, asked, given)
    made = tuple(each for each in task.mistakes if each in found)
    if not made:
        return first
    hints = tuple(task.mistakes[each] for each in made)
    return Verdict(task.name, first.state, first.said, made, hints, first.at)


def fresh(case: Case) -> tuple[Any, ...]:
    """Arguments that nobody has touched."""
    return copy.deepcopy(case.args)


def tried(task: Task, function: Any, case: Case, right: Told, places: Places) -> tuple[Told, Verdict | None]:
    """What it gives for one case, and what is wrong with it."""
    args = fresh(case)
    before = [told(each) for each in args]
    try:
        value = told(function(*args))
    except TooLongError as error:
        raise TooLongError(places.of(error)) from error
    except NotImplementedError as error:
        return Told("raised", "NotImplementedError"), unwritten(task, error, places)
    except (Exception, SystemExit) as error:
        return Told("raised", type(error).__name__), raised(task, case, error, places)
    found = difference(right, value, task.axes)
    if found is not None:
        return value, Verdict(task.name, "wrong", f"{case.what} {found}")
    if any(difference(one, told(other)) for one, other in zip(before, args, strict=True)):
        said = f"{case.what} gave what is right, but changed its argument on the way: make a new tensor in place of it"
        return value, Verdict(task.name, "wrong", said)
    return value, None


def is_unwritten(error: BaseException) -> bool:
    """Whether this is the stub's own line, with its words or without."""
    return isinstance(error, NotImplementedError) and str(error) in (UNWRITTEN, "")


def unwritten(task: Task, error: NotImplementedError, places: Places) -> Verdict:
    """Either this function is not written, or one that it calls."""
    frames = [each.name for each in traceback.extract_tb(error.__traceback__) if each.filename in places.texts]
    if not is_unwritten(error):
        return Verdict(task.name, "unwritten", f"raises NotImplementedError: {first_line(error)}", at=places.of(error))
    if frames and frames[-1] != task.name:
        return Verdict(task.name, "unwritten", f"calls {frames[-1]}, which is {UNWRITTEN}")
    return Verdict(task.name, "unwritten", f"is {UNWRITTEN}")


def raised(task: Task, case: Case, error: BaseException, places: Places) -> Verdict:
    """An error of the learner's, in one sentence."""
    at, said = places.of(error), first_line(error)
    if isinstance(error, SystemExit):
        return Verdict(
            task.name, "failed", f"{case.what} ends itself by exit() or sys.exit(): return in place of it", at=at
        )
    if is_memory(error):
        return Verdict(task.name, "failed", f"{case.what} asked for more memory than an exercise may have", at=at)
    if not at and isinstance(error, TypeError):
        return Verdict(task.name, "failed", f"cannot be called as the stub has it: {said}")
    hints = tuple(hint for part, hint in KNOWN.items() if part in str(error))
    return Verdict(task.name, "failed", f"{case.what} raised {type(error).__name__}: {said}", hints=hints, at=at)


def is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "not enough memory" in str(error) or "can't allocate memory" in str(error)


def likely(task: Task, asked: list[Told], given: list[Told]) -> Made:
    """The fewest mistakes that give these very values, and other ones than are right: in all cases, or at least in
    those that gave a value."""
    for cases in (range(len(given)), [n for n, value in enumerate(given) if value.kind != "raised"]):
        for made in task.made():
            fits = all(alike(crooked(task, made, n), given[n]) for n in cases)
            if fits and not all(alike(crooked(task, made, n), asked[n]) for n in cases):
                return made
    return Made()


@cache
def crooked(task: Task, made: Made, n: int) -> Told:
    """What the mistakes give for a case (none: what is right). Some fail by themselves, or where others are made."""
    args = fresh(task.cases[n])
    if not made:
        return told(task.solution(*args))
    try:
        return told(task.wrong(made, *args))
    except Exception as error:
        return Told("raised", type(error).__name__)


# ---------------------------------------------------------------------------------------- tables


def of_table(task: Table, written: Mapping[str, Any]) -> Verdict:
    given = written.get(task.name)
    if not isinstance(given, dict):
        what = "is not there" if given is None else f"is {told(given).name} where a dict was asked"
        return Verdict(task.name, "missing", f"{what}: the stub has it")
    chosen = {key: str(given.get(key, task.unwritten)).strip() for key in task.answers}
    open_ones = [key for key, name in chosen.items() if name == task.unwritten]
    if len(open_ones) == len(chosen):
        return Verdict(task.name, "unwritten", f"is {UNWRITTEN}")
    for key, name in chosen.items():
        if name not in task.why and name != task.unwritten:
            return Verdict(task.name, "wrong", f"says {name!r} of {key}; the names are {', '.join(task.why)}")
    wrong = [key for key, name in chosen.items() if name not in (task.answers[key], task.unwritten)]
    if wrong:
        said = "; ".join(f"{key} {task.what} '{chosen[key]}'" for key in wrong)
        names = dict.fromkeys(chosen[key] for key in wrong)
        return Verdict(task.name, "wrong", said, hints=tuple(f"{name}: {task.why[name]}" for name in names))
    if open_ones:
        return Verdict(task.name, "unwritten", f"is right so far; {', '.join(open_ones)} still stand at '?'")
    return Verdict(task.name, "right")


# ---------------------------------------------------------------------------------------- torch as it was


def torch_now() -> dict[str, dict[str, Any]]:
    """The functions that torch consists of, to be compared later."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    places = {"torch": torch, "torch.nn.functional": torch.nn.functional, "torch.Tensor": torch.Tensor}
    return {
        name: {key: each for key, each in vars(place).items() if is_function(key, each)}
        for name, place in places.items()
    }


def is_function(key: str, value: Any) -> bool:
    return not key.startswith("_") and callable(value) and not isinstance(value, type)


def replaced(before: dict[str, dict[str, Any]]) -> list[str]:
    """Names of torch that are something else by now. What torch itself wrapped in the meantime keeps its name."""
    found = []
    for place, names in torch_now().items():
        was = before.get(place, names)
        found += [
            f"{place}.{key}" for key in was if names.get(key) is not was[key] and not is_torchs(names.get(key), key)
        ]
        found += [
            f"{place}.{key}"
            for key, each in names.items()
            if key not in was and getattr(each, "__module__", None) == LEARNER
        ]
    return found


def is_torchs(value: Any, key: str) -> bool:
    home = getattr(value, "__module__", None) or ""
    return home.split(".")[0] == "torch" and getattr(value, "__name__", None) == key
