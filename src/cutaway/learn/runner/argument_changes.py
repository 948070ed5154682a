"""Find the line of a learner's function that modifies an argument in place."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from cutaway.learn.runner.value_comparison import PlainValue, to_plain_value, values_equal


@dataclass(frozen=True)
class Modification:
    """An argument that was modified, and the line that modified it."""

    argument: str
    location: str


def find_modification(
    function: Callable[..., object], args: Sequence[Any], sources: Mapping[str, str]
) -> Modification | None:
    """Call the function, and return the first line in `sources` (texts by file name) that modifies an argument."""
    tracer = _ArgumentTracer(args, sources)
    previous = sys.gettrace()
    sys.settrace(tracer.enter)
    try:
        function(*args)
    finally:
        sys.settrace(previous)
    if tracer.modified is None:
        return None
    names = list(inspect.signature(function).parameters)
    index, filename, line = tracer.modified
    text = sources[filename].splitlines()[line - 1].strip()
    return Modification(names[min(index, len(names) - 1)], f"line {line} of {filename}: `{text}`")


class _ArgumentTracer:
    """Compares the arguments with their initial values after each line."""

    def __init__(self, args: Sequence[Any], sources: Mapping[str, str]) -> None:
        self.args, self.sources = args, sources
        self.before: list[PlainValue] = [to_plain_value(arg) for arg in args]
        self.modified: tuple[int, str, int] | None = None
        """Index of the argument, file name and line."""

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self.sources:
            return None
        line = frame.f_lineno

        def trace_line(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal line
            if self.modified is None and event in ("line", "return"):
                self._compare(frame.f_code.co_filename, line)
            line = frame.f_lineno
            return trace_line

        return trace_line

    def _compare(self, filename: str, line: int) -> None:
        for index, (before, arg) in enumerate(zip(self.before, self.args, strict=True)):
            if not values_equal(before, to_plain_value(arg)):
                self.modified = index, filename, line
                return
