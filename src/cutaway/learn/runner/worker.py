"""Worker process that runs a learner's code, started by the launcher.

    python -m cutaway.learn.runner.worker <exercise> <seconds> <file> …

The separate process protects against accidents (infinite loops, memory exhaustion, exits, crashes, loops that fork). It
is not a sandbox: the file is trusted like any other program. The results are written to standard output, one JSON
object per line. What the learner's code prints is redirected to standard error.
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
from typing import Literal

from cutaway.errors import CutawayError, InputError, format_error
from cutaway.learn.exercises import get_exercise
from cutaway.learn.exercises.exercise_file import NOT_WRITTEN
from cutaway.learn.exercises.learner_file import CodeCell, read_code_cells
from cutaway.learn.exercises.task import Tasks
from cutaway.learn.runner.grader import (
    LEARNER_MODULE,
    GradeReport,
    LearnerSource,
    find_replaced_names,
    grade_tasks,
    is_memory_error,
    is_not_written,
    precompute_solutions,
    snapshot_torch,
)
from cutaway.learn.runner.limits import (
    MAX_MEMORY_BYTES,
    TimeLimitError,
    forbid_processes_and_network,
    raise_time_limit,
    set_resource_limits,
)


class LearnerSyntaxError(CutawayError):
    """The learner's file is not valid Python. `location` is the line of the error."""

    def __init__(self, error: BaseException, cell: CodeCell) -> None:
        super().__init__(error.msg if isinstance(error, SyntaxError) else format_error(error))
        self.location = cell.name
        if isinstance(error, SyntaxError):
            self.location = f"line {error.lineno} of {cell.name}: {(error.text or '').strip()}"


def main(arguments: list[str]) -> None:
    """Grade the files of an exercise; write one report per line as JSON to standard output."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the learner's output goes to standard error

    number, seconds, *files = arguments
    tasks: Tasks = runpy.run_path(str(get_exercise(int(number)).path))["TASKS"]
    precompute_solutions(tasks)
    set_resource_limits(2 * float(seconds) * len(files))
    forbid_processes_and_network()
    print("ready", file=results, flush=True)
    for file in files:
        report = grade_file(tasks, Path(file), float(seconds))
        _flush_output()
        print(json.dumps(asdict(report)), file=results, flush=True)
    results.close()
    os._exit(0)  # do not wait for the learner's threads and atexit handlers


def _flush_output() -> None:
    """Flush the learner's output. This is done before a result is sent, because the launcher may then stop reading."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


def grade_file(tasks: Tasks, path: Path, time_limit: float) -> GradeReport:
    """Grade one file. If this takes more than `time_limit` seconds, the status of the report is "error"."""
    has_timer = hasattr(signal, "setitimer")
    if has_timer:
        signal.signal(signal.SIGALRM, raise_time_limit)
        signal.setitimer(signal.ITIMER_REAL, time_limit)
    try:
        return _grade_cells(tasks, read_code_cells(path), path)
    except InputError as error:
        return GradeReport("error", f"cannot be read: {error}")
    except LearnerSyntaxError as error:
        return GradeReport("error", f"is not valid Python: {error}", error.location)
    except TimeLimitError as error:
        return GradeReport("error", f"ran longer than {time_limit:g} s: is there an infinite loop?", str(error))
    finally:
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _grade_cells(tasks: Tasks, cells: list[CodeCell], path: Path) -> GradeReport:
    source = LearnerSource({cell.name: cell.text for cell in cells})
    snapshot = snapshot_torch()
    namespace, notes = _run_cells(cells, path, source)
    replaced = find_replaced_names(snapshot)
    if replaced:
        return GradeReport("error", f"replaces {replaced[0]}, so that results are unreliable: use another name")
    grades = grade_tasks(tasks, namespace, source)
    if notes and all(grade.status == "missing" for grade in grades):  # the file failed before the definitions
        return GradeReport("error", notes[0]["message"], notes[0]["location"])
    replaced = find_replaced_names(snapshot)
    if replaced:
        return GradeReport("error", f"replaces {replaced[0]} at run time: use another name")
    statuses = {grade.status for grade in grades}
    status: Literal["passed", "failed", "partial", "not_written"] = "partial"
    if statuses == {"correct"}:
        status = "passed"
    elif statuses & {"incorrect", "error", "missing"}:
        status = "failed"
    elif all(grade.message == f"is {NOT_WRITTEN}" for grade in grades):
        status = "not_written"
    return GradeReport(status, tasks=tuple(grades), notes=tuple(notes))


def _run_cells(
    cells: list[CodeCell], path: Path, source: LearnerSource
) -> tuple[dict[str, object], list[dict[str, str]]]:
    """Run a file statement by statement, and continue after errors. Return the namespace and notes on the errors."""
    module = types.ModuleType(LEARNER_MODULE)
    module.__file__ = str(path)
    sys.modules[LEARNER_MODULE] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # appended, so that a torch.py next to the file does not shadow torch
    namespace = module.__dict__
    namespace["display"] = print
    notes: list[dict[str, str]] = []
    flags = 0
    for cell in cells:
        try:
            tree = ast.parse(cell.text, cell.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise LearnerSyntaxError(error, cell) from None
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                flags |= sum(getattr(__future__, feature.name).compiler_flag for feature in node.names)
            try:
                exec(compile(ast.Module([node], []), cell.name, "exec", flags, dont_inherit=True), namespace)
            except TimeLimitError as error:
                raise TimeLimitError(source.locate(error)) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                _add_note(error, source, notes)
                if isinstance(error, SystemExit):
                    return namespace, notes
    return namespace, notes


def _add_note(error: BaseException, source: LearnerSource, notes: list[dict[str, str]]) -> None:
    """Record an error outside the graded functions, except the stub's own NotImplementedError."""
    if is_not_written(error):
        return
    message = f"raised {type(error).__name__}: {format_error(error)}"
    if isinstance(error, SystemExit):
        message = "calls exit() or sys.exit(): remove it, so that the file can be graded"
    if isinstance(error, EOFError):
        message = "waits for keyboard input, which is not available here: remove input()"
    if is_memory_error(error):
        message = f"exceeded the memory limit of an exercise ({MAX_MEMORY_BYTES >> 30} GiB)"
    notes.append({"message": message, "location": source.locate(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
