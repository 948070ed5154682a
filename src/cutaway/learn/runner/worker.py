"""Where a learner's code runs: `python -m cutaway.learn.runner.worker 3 20 file.py …`, started by the launcher.

This is a guard against accidents — endless loops, all the memory, exits, crashes — and no sandbox: who runs a file
trusts it as far as any program. Standard output carries the answers, a JSON object a line; what the learner prints
goes to standard error.
"""

import __future__

import ast
import json
import os
import runpy
import signal
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError, InputError, format_error
from cutaway.learn.exercises import get_exercise
from cutaway.learn.exercises.exercise_file import NOT_WRITTEN
from cutaway.learn.exercises.learner_file import CodeCell, read_code_cells
from cutaway.learn.exercises.task import Tasks
from cutaway.learn.runner.grader import (
    LEARNER_MODULE,
    LearnerSource,
    TaskGrade,
    find_replaced_names,
    grade_tasks,
    is_memory_error,
    is_not_written,
    precompute_solutions,
    snapshot_torch,
)
from cutaway.learn.runner.limits import MAX_MEMORY_BYTES, TimeLimitError, raise_time_limit, set_resource_limits


class LearnerSyntaxError(CutawayError):
    """A file that Python cannot read, and the line where it stops."""

    def __init__(self, error: BaseException, cell: CodeCell) -> None:
        super().__init__(error.msg if isinstance(error, SyntaxError) else format_error(error))
        self.location = (
            f"line {error.lineno} of {cell.name}: {(error.text or '').strip()}"
            if isinstance(error, SyntaxError)
            else cell.name
        )


def main(arguments: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the learner prints

    def tell(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    number, seconds, *files = arguments
    tasks: Tasks = runpy.run_path(str(get_exercise(int(number)).path))["TASKS"]
    precompute_solutions(tasks)
    set_resource_limits(2 * float(seconds) * len(files))
    tell({"ready": True})
    for file in files:
        found = grade_file(tasks, Path(file), float(seconds))
        _flush_output()
        tell(found)
    answers.close()
    os._exit(0)  # threads and what the learner left to be done at the end are not waited for


def _flush_output() -> None:
    """What the learner printed goes out before the answer, after which nobody listens."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


def grade_file(tasks: Tasks, path: Path, time_limit: float) -> dict[str, Any]:
    """The verdict on one file within its time, as JSON has it."""
    clock = hasattr(signal, "setitimer")
    if clock:
        signal.signal(signal.SIGALRM, raise_time_limit)
        signal.setitimer(signal.ITIMER_REAL, time_limit)
    try:
        return _grade_cells(tasks, read_code_cells(path), path)
    except InputError as error:
        return _error_result(f"cannot be read: {error}")
    except LearnerSyntaxError as error:
        return _error_result(f"is no Python: {error}", error.location)
    except TimeLimitError as error:
        return _error_result(f"ran longer than {time_limit:g} s: is there a loop that never ends?", str(error))
    finally:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _error_result(message: str, location: str = "") -> dict[str, Any]:
    return {"status": "error", "message": message, "location": location, "tasks": [], "notes": []}


def _grade_cells(tasks: Tasks, cells: list[CodeCell], path: Path) -> dict[str, Any]:
    source = LearnerSource({piece.name: piece.text for piece in cells})
    torch_was = snapshot_torch()
    written, notes = _run_cells(cells, path, source)
    changed = find_replaced_names(torch_was)
    if changed:
        return _error_result(
            f"replaces {changed[0]} by something else, so that nothing can be trusted: give yours a new name"
        )
    grades = grade_tasks(tasks, written, source)
    if notes and all(each.status == "missing" for each in grades):  # it did not come as far as to define them
        return _error_result(notes[0]["message"], notes[0]["location"])
    changed = find_replaced_names(torch_was)
    if changed:
        return _error_result(f"replaces {changed[0]} while it runs: give yours another name")
    return {
        "status": _overall_status(grades),
        "message": "",
        "location": "",
        "tasks": [asdict(each) for each in grades],
        "notes": notes,
    }


def _overall_status(grades: list[TaskGrade]) -> str:
    found = {each.status for each in grades}
    if found == {"correct"}:
        return "passed"
    if found == {"not_written"} and all(each.message == f"is {NOT_WRITTEN}" for each in grades):
        return "not_written"
    return "failed" if found & {"incorrect", "error", "missing"} else "partial"


def _run_cells(cells: list[CodeCell], path: Path, source: LearnerSource) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Run a file statement by statement, as a notebook whose cells may fail: names it made, and what went wrong."""
    module = types.ModuleType(LEARNER_MODULE)
    module.__file__ = str(path)
    sys.modules[LEARNER_MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a torch.py beside it hides nothing
    names = module.__dict__
    names["display"] = print
    notes: list[dict[str, str]] = []
    flags = 0
    for piece in cells:
        try:
            tree = ast.parse(piece.text, piece.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise LearnerSyntaxError(error, piece) from None
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                flags |= sum(getattr(__future__, each.name).compiler_flag for each in node.names)
            try:
                exec(compile(ast.Module([node], []), piece.name, "exec", flags, dont_inherit=True), names)
            except TimeLimitError as error:
                raise TimeLimitError(source.locate(error)) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                _add_note(error, source, notes)
                if isinstance(error, SystemExit):
                    return names, notes
    return names, notes


def _add_note(error: BaseException, source: LearnerSource, notes: list[dict[str, str]]) -> None:
    """An error outside of what is asked is no wrong answer, but is told. That something is not written yet is known."""
    if is_not_written(error):
        return
    said = f"raised {type(error).__name__}: {format_error(error)}"
    if isinstance(error, SystemExit):
        said = "ends itself by exit() or sys.exit(): take that out, so that it can be looked at"
    if isinstance(error, EOFError):
        said = "waits for something to be typed, and nobody types here: take input() out"
    if is_memory_error(error):
        said = f"asked for more memory than an exercise may have ({MAX_MEMORY_BYTES >> 30} GiB)"
    notes.append({"message": said, "location": source.locate(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
