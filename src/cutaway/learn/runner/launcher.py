"""Have a learner's file graded by a process of its own, which may loop, crash or eat memory without harm to others."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cutaway.errors import CutawayError
from cutaway.learn.exercises import Exercise

TIME_LIMIT_SECONDS = 20.0
"""For one file, from when torch is there. A child that cannot give up by itself is ended after half as long again."""
STARTUP_TIMEOUT_SECONDS = 180.0
"""Until torch is there."""
MAX_OUTPUT_CHARS = 8_000
"""Characters of what the learner prints."""
INHERITED_ENV_VARS = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TMPDIR",
    "TEMP",
    "TMP",
    "SYSTEMROOT",
    "LD_LIBRARY_PATH",
)
"""What a child knows of its surroundings; tokens and passwords are not among it."""


@dataclass(frozen=True)
class GradeReport:
    """What is said to a learner."""

    status: str
    """passed, failed, partial (right so far), not_written, or error (nothing could be graded)."""
    message: str
    location: str
    tasks: list[dict[str, Any]]
    notes: list[dict[str, str]]
    output: str

    @property
    def passed(self) -> bool:
        return self.status == "passed"


class WorkerError(CutawayError):
    """The process that grades could not even begin."""


def grade_files(
    exercise: Exercise, paths: Sequence[Path], *, time_limit: float = TIME_LIMIT_SECONDS
) -> list[GradeReport]:
    """The verdict on each file. What is printed belongs to all of them."""
    with tempfile.TemporaryDirectory(prefix="cutaway-learn-") as folder:
        child = WorkerProcess(exercise, [path.resolve() for path in paths], folder, time_limit)
        try:
            found = child.results(len(paths))
        finally:
            child.terminate()
    return [GradeReport(output=child.output, **each) for each in found]


class WorkerProcess:
    """The process, and two threads that listen to it."""

    def __init__(self, exercise: Exercise, paths: Sequence[Path], directory: str, time_limit: float) -> None:
        self.timeout = 1.5 * time_limit + 1
        command = [sys.executable, "-P", "-s", "-X", "utf8", "-m", "cutaway.learn.runner.worker"]
        self.process = subprocess.Popen(
            [*command, str(exercise.number), str(time_limit), *map(str, paths)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=worker_environment(),
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.output_parts: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.reader_threads = [
            threading.Thread(target=self._read_results, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_output, args=(self.process.stderr,), daemon=True),
        ]
        for each in self.reader_threads:
            each.start()

    def _read_results(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self.lines.put(line.decode(errors="replace"))
        self.lines.put(None)

    def _read_output(self, pipe: IO[bytes]) -> None:
        """What is printed: its beginning is kept, all of it is read, so that nobody waits."""
        count = 0
        while part := os.read(pipe.fileno(), 65536):
            if count < MAX_OUTPUT_CHARS:
                self.output_parts.append(part.decode(errors="replace")[: MAX_OUTPUT_CHARS - count])
            count += len(part)
        if count > MAX_OUTPUT_CHARS:
            self.output_parts.append(f"\n… {count:,} bytes were printed; the rest is left out")

    @property
    def output(self) -> str:
        return "".join(self.output_parts)

    def _next_message(self, timeout: float) -> dict[str, Any] | None:
        """The next thing it says; nothing where it ended or is silent for too long."""
        try:
            line = self.lines.get(timeout=timeout)
            said = None if line is None else json.loads(line)
        except (queue.Empty, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def results(self, count: int) -> list[dict[str, Any]]:
        if self._next_message(STARTUP_TIMEOUT_SECONDS) is None:
            self.terminate()
            why = self.output.strip().splitlines()[-1:] or ["it said nothing"]
            raise WorkerError(f"the process that grades exercises did not start: {why[0]}")
        found: list[dict[str, Any]] = []
        while len(found) < count:
            said = self._next_message(self.timeout)
            if said is None:
                said = {"status": "error", "message": self._exit_reason(), "location": "", "tasks": [], "notes": []}
                return [*found, *[said] * (count - len(found))]
            found.append(said)
        return found

    def _exit_reason(self) -> str:
        """Why no answer came."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return f"ran longer than {self.timeout:g} s and could not be interrupted: is there a loop that never ends?"
        if code >= 0:
            return f"ended the whole process with exit code {code}: take os._exit or the like out"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        why = {
            "SIGKILL": "it was ended from outside, as happens when memory is short",
            "SIGXCPU": "it used more time than an exercise may: is there a loop that never ends?",
            "SIGXFSZ": "it wrote a file larger than an exercise may",
        }
        return f"ended by {name}: {why.get(name, 'it crashed, deeper than Python can tell')}"

    def terminate(self) -> None:
        """End it, and whatever it started."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # all of them are gone
                self.process.kill()
        else:
            self.process.kill()
        self.process.wait()
        for each in self.reader_threads:
            each.join(timeout=5)


def worker_environment() -> dict[str, str]:
    """The same Python with the same packages, one thread, no GPU, no network of models."""
    kept = {name: os.environ[name] for name in INHERITED_ENV_VARS if name in os.environ}
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
