"""An instrumented function of a learner: run it with an edit, and follow from which steps a step is computed."""

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cutaway.learn.exercises.task import FunctionTask
from cutaway.learn.runner.instrumentation import Edit, Step, StepLimitError, StepRecorder
from cutaway.learn.runner.value_comparison import PlainValue, to_plain_value


@dataclass
class InstrumentedFunction:
    """An instrumented function of a learner, with its steps and the recorder that evaluates them."""

    function: Callable[..., Any]
    steps: Sequence[Step]
    recorder: StepRecorder

    def run(self, args: Sequence[object], case_index: int, edit: Edit | None = None) -> PlainValue | None:
        """Run the function with a change of one step. Return its value, or None if it fails or takes too many steps."""
        self.recorder.start(case_index, edit)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                return to_plain_value(self.function(*map(_copy, args)))
        except (Exception, StepLimitError, SystemExit):  # changed code may fail in any way
            return None

    def dependencies(self, index: int) -> set[int]:
        """Return the indices of all steps from which a step was computed in the last run, through variables too."""
        found: set[int] = set()
        pending = [index]
        while pending:
            step = self.steps[pending.pop()]
            source = self.recorder.name_sources.get(step.index)
            for child in (*step.children, *([] if source is None else [source])):
                if child not in found and child != index:
                    found.add(child)
                    pending.append(child)
        return found

    def used_arguments(self, index: int) -> set[str]:
        """Return the names of the arguments of the step's function from which the step was computed."""
        step = self.steps[index]
        arguments = self.recorder.arguments.get(step.function, {})
        used = [self.steps[n] for n in (index, *self.dependencies(index)) if n not in self.recorder.name_sources]
        return {other.detail for other in used if other.kind == "name" and other.detail in arguments}

    def record_unchanged(self, task: FunctionTask) -> None:
        """Run all cases without an edit, and keep the values of the steps."""
        for number, case in enumerate(task.cases):
            self.run(case.args, number)
            self.recorder.unchanged_values[number] = dict(self.recorder.values)


def _copy(value: Any) -> Any:
    """Copy an argument. For a tensor, this is much faster than deepcopy."""
    return value.detach().clone() if is_tensor(value) else copy.deepcopy(value)


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # some exercises do not use torch
    return torch is not None and isinstance(value, torch.Tensor)


def is_numeric(value: object) -> bool:
    """Whether a value is a tensor or a number."""
    return is_tensor(value) or (isinstance(value, int | float) and not isinstance(value, bool))
