"""Launch the worker process that grades a learner's file. Infinite loops and crashes only affect that process."""

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from cutaway.errors import CutawayError
from cutaway.learn.exercises import Exercise
from cutaway.learn.runner.grader import GradeReport

_TIME_LIMIT_SECONDS = 20.0
"""Time limit per file, not counting the import of torch. A worker that cannot be interrupted is killed after 1.5 times
this limit."""
_STARTUP_TIMEOUT_SECONDS = 180.0
"""Time limit for the import of torch."""
_MAX_OUTPUT_CHARS = 8_000
"""Maximum number of characters that are kept of what the learner's file prints."""
_INHERITED_ENV_VARS = "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR TEMP TMP SYSTEMROOT LD_LIBRARY_PATH"
"""Environment variables that are passed to the worker. Tokens and passwords are not among them."""


_POLL_SECONDS = 0.2
"""Time between two calls of a poll function."""
PollFunction = Callable[[str], None]
"""Called repeatedly while the worker runs, with what it does. An exception that it raises ends the worker."""


_REPORT = TypeAdapter(GradeReport)


class WorkerError(CutawayError):
    """The worker process did not start."""


def grade_files(
    exercise: Exercise,
    paths: Sequence[Path],
    *,
    time_limit: float = _TIME_LIMIT_SECONDS,
    poll: PollFunction = lambda phase: None,
) -> list[GradeReport]:
    """Grade the files in one worker process. The `output` of every report is what all files together have printed."""
    with tempfile.TemporaryDirectory(prefix="cutaway-learn-") as directory:
        worker = WorkerProcess(exercise, [path.resolve() for path in paths], directory, time_limit)
        try:
            results = worker.results(len(paths), poll)
        finally:
            worker.terminate()
    return [replace(result, output=worker.output) for result in results]


class WorkerProcess:
    """The worker process, and two threads that read its pipes."""

    def __init__(self, exercise: Exercise, paths: Sequence[Path], directory: str, time_limit: float) -> None:
        self.timeout = 1.5 * time_limit + 1
        command = [sys.executable, "-P", "-s", "-X", "utf8", "-m", "cutaway.learn.runner.worker"]
        self.process = subprocess.Popen(
            [*command, str(exercise.number), str(time_limit), *map(str, paths)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=_worker_environment(),
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
        for thread in self.reader_threads:
            thread.start()

    def _read_results(self, pipe: IO[bytes]) -> None:
        """Put the JSON lines of standard output into the queue, and None at the end."""
        for line in pipe:
            self.lines.put(line.decode(errors="replace"))
        self.lines.put(None)

    def _read_output(self, pipe: IO[bytes]) -> None:
        """Read standard error to its end, so that the worker never blocks. Only the beginning is kept."""
        count = 0
        while part := os.read(pipe.fileno(), 65536):
            if count < _MAX_OUTPUT_CHARS:
                self.output_parts.append(part.decode(errors="replace")[: _MAX_OUTPUT_CHARS - count])
            count += len(part)
        if count > _MAX_OUTPUT_CHARS:
            self.output_parts.append(f"\n… {count:,} bytes were printed; the rest is omitted")

    @property
    def output(self) -> str:
        return "".join(self.output_parts)

    def _next_line(self, timeout: float, poll: PollFunction, phase: str) -> str | None:
        """Return the next line of the worker's standard output, or None if it exited or exceeded the timeout."""
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            poll(phase)
            try:
                return self.lines.get(timeout=min(remaining, _POLL_SECONDS))
            except queue.Empty:
                continue
        return None

    def results(self, count: int, poll: PollFunction = lambda phase: None) -> list[GradeReport]:
        """Return one report per file. After a crash or timeout, all remaining files get the same error.

        Raises WorkerError if the worker did not start."""
        if self._next_line(_STARTUP_TIMEOUT_SECONDS, poll, "starting the process that runs your code") is None:
            self.terminate()
            reason = self.output.strip().splitlines()[-1:] or ["it printed nothing"]
            raise WorkerError(f"the process that grades exercises did not start: {reason[0]}")
        results: list[GradeReport] = []
        while len(results) < count:
            try:
                line = self._next_line(self.timeout, poll, "running the test cases")
                results.append(_REPORT.validate_json(line or ""))
            except ValueError:
                return [*results, *[GradeReport("error", self._exit_reason())] * (count - len(results))]
        return results

    def _exit_reason(self) -> str:
        """Describe why the worker sent no result."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return f"ran longer than {self.timeout:g} s and could not be interrupted: is there an infinite loop?"
        if code >= 0:
            return f"ended the process with exit code {code}: remove os._exit or similar calls"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        reasons = {
            "SIGKILL": "it was killed from outside, for example when memory is exhausted",
            "SIGXCPU": "it exceeded the CPU time limit: is there an infinite loop?",
            "SIGXFSZ": "it exceeded the file size limit",
        }
        return f"ended by {name}: {reasons.get(name, 'it crashed in native code')}"

    def terminate(self) -> None:
        """Kill the worker and its child processes."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # the process group has already exited
                self.process.kill()
        else:
            self.process.kill()
        self.process.wait()
        for thread in self.reader_threads:
            thread.join(timeout=5)


def _worker_environment() -> dict[str, str]:
    """Return the environment variables of the worker: the same packages, one thread, no GPU, no Hugging Face Hub."""
    inherited = {name: os.environ[name] for name in _INHERITED_ENV_VARS.split() if name in os.environ}
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**inherited, **fixed, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
