"""Where a learner's code runs: `python -m cutaway.learn.child 3 20 file.py …`, started by `cutaway.learn.guard`.

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

from cutaway.errors import CutawayError, InputError, first_line
from cutaway.learn.exercises import exercise
from cutaway.learn.judge import (
    LEARNER,
    Places,
    TooLongError,
    Verdict,
    is_memory,
    is_unwritten,
    judge,
    prepare,
    replaced,
    torch_now,
)
from cutaway.learn.sheet import Piece, pieces
from cutaway.learn.source import UNWRITTEN
from cutaway.learn.task import Tasks

ROOM = 4 << 30
"""Bytes that it may take beside what is there when it begins."""
FILE = 64 << 20
"""Bytes of a file that it may write."""


class NoPythonError(CutawayError):
    """A file that Python cannot read, and the line where it stops."""

    def __init__(self, error: BaseException, piece: Piece) -> None:
        super().__init__(error.msg if isinstance(error, SyntaxError) else first_line(error))
        self.at = (
            f"line {error.lineno} of {piece.name}: {(error.text or '').strip()}"
            if isinstance(error, SyntaxError)
            else piece.name
        )


def main(arguments: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the learner prints

    def tell(data: dict[str, Any]) -> None:
        answers.write(json.dumps(data) + "\n")
        answers.flush()

    number, seconds, *files = arguments
    tasks: Tasks = runpy.run_path(str(exercise(int(number)).path))["TASKS"]
    prepare(tasks)
    limit(2 * float(seconds) * len(files))
    tell({"ready": True})
    for file in files:
        found = answer(tasks, Path(file), float(seconds))
        flush()
        tell(found)
    answers.close()
    os._exit(0)  # threads and what the learner left to be done at the end are not waited for


def flush() -> None:
    """What the learner printed goes out before the answer, after which nobody listens."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None and not stream.closed:
            stream.flush()


def limit(seconds: float) -> None:
    """What one learner may use. Where the platform has no such limits, the clock of the parent remains."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: FILE,
        resource.RLIMIT_CPU: int(used + seconds) + 1,
    }
    statm = Path("/proc/self/statm")
    if statm.exists():
        wanted[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + ROOM
    for which, most in wanted.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, hard))


def too_long(*_: Any) -> None:
    raise TooLongError


def answer(tasks: Tasks, path: Path, seconds: float) -> dict[str, Any]:
    """The verdict on one file within its time, as JSON has it."""
    clock = hasattr(signal, "setitimer")
    if clock:
        signal.signal(signal.SIGALRM, too_long)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return verdict(tasks, pieces(path), path)
    except InputError as error:
        return stopped(f"cannot be read: {error}")
    except NoPythonError as error:
        return stopped(f"is no Python: {error}", error.at)
    except TooLongError as error:
        return stopped(f"ran longer than {seconds:g} s: is there a loop that never ends?", str(error))
    finally:
        if clock:
            signal.setitimer(signal.ITIMER_REAL, 0)


def stopped(said: str, at: str = "") -> dict[str, Any]:
    return {"state": "stopped", "said": said, "at": at, "verdicts": [], "notes": []}


def verdict(tasks: Tasks, code: list[Piece], path: Path) -> dict[str, Any]:
    places = Places({piece.name: piece.text for piece in code})
    torch_was = torch_now()
    written, notes = run(code, path, places)
    changed = replaced(torch_was)
    if changed:
        return stopped(
            f"replaces {changed[0]} by something else, so that nothing can be trusted: give yours a new name"
        )
    verdicts = judge(tasks, written, places)
    if notes and all(each.state == "missing" for each in verdicts):  # it did not come as far as to define them
        return stopped(notes[0]["said"], notes[0]["at"])
    changed = replaced(torch_was)
    if changed:
        return stopped(f"replaces {changed[0]} while it runs: give yours another name")
    return {
        "state": state(verdicts),
        "said": "",
        "at": "",
        "verdicts": [asdict(each) for each in verdicts],
        "notes": notes,
    }


def state(verdicts: list[Verdict]) -> str:
    found = {each.state for each in verdicts}
    if found == {"right"}:
        return "passed"
    if found == {"unwritten"} and all(each.said == f"is {UNWRITTEN}" for each in verdicts):
        return UNWRITTEN
    return "wrong" if found & {"wrong", "failed", "missing"} else "partly"


def run(code: list[Piece], path: Path, places: Places) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Run a file statement by statement, as a notebook whose cells may fail: names it made, and what went wrong."""
    module = types.ModuleType(LEARNER)
    module.__file__ = str(path)
    sys.modules[LEARNER] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a torch.py beside it hides nothing
    names = module.__dict__
    names["display"] = print
    notes: list[dict[str, str]] = []
    flags = 0
    for piece in code:
        try:
            tree = ast.parse(piece.text, piece.name)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NoPythonError(error, piece) from None
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                flags |= sum(getattr(__future__, each.name).compiler_flag for each in node.names)
            try:
                exec(compile(ast.Module([node], []), piece.name, "exec", flags, dont_inherit=True), names)
            except TooLongError as error:
                raise TooLongError(places.of(error)) from error
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                note(error, places, notes)
                if isinstance(error, SystemExit):
                    return names, notes
    return names, notes


def note(error: BaseException, places: Places, notes: list[dict[str, str]]) -> None:
    """An error outside of what is asked is no wrong answer, but is told. That something is not written yet is known."""
    if is_unwritten(error):
        return
    said = f"raised {type(error).__name__}: {first_line(error)}"
    if isinstance(error, SystemExit):
        said = "ends itself by exit() or sys.exit(): take that out, so that it can be looked at"
    if isinstance(error, EOFError):
        said = "waits for something to be typed, and nobody types here: take input() out"
    if is_memory(error):
        said = f"asked for more memory than an exercise may have ({ROOM >> 30} GiB)"
    notes.append({"said": said, "at": places.of(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
