"""Have a learner's file judged by a process of its own, which may loop, crash or eat memory without harm to others."""

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

SECONDS = 20.0
"""For one file, from when torch is there. A child that cannot give up by itself is ended after half as long again."""
STARTING = 180.0
"""Until torch is there."""
SHOWN = 8_000
"""Characters of what the learner prints."""
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH")
"""What a child knows of its surroundings; tokens and passwords are not among it."""


@dataclass(frozen=True)
class Judged:
    """What is said to a learner."""

    state: str
    """passed, wrong, partly (right so far), not written yet, or stopped (nothing could be judged)."""
    said: str
    at: str
    verdicts: list[dict[str, Any]]
    notes: list[dict[str, str]]
    printed: str

    @property
    def passed(self) -> bool:
        return self.state == "passed"


class ChildError(CutawayError):
    """The process that judges could not even begin."""


def judged(exercise: Exercise, paths: Sequence[Path], *, seconds: float = SECONDS) -> list[Judged]:
    """The verdict on each file. What is printed belongs to all of them."""
    with tempfile.TemporaryDirectory(prefix="cutaway-learn-") as folder:
        child = Child(exercise, [path.resolve() for path in paths], folder, seconds)
        try:
            found = child.answers(len(paths))
        finally:
            child.end()
    return [Judged(printed=child.printed, **each) for each in found]


class Child:
    """The process, and two threads that listen to it."""

    def __init__(self, exercise: Exercise, paths: Sequence[Path], folder: str, seconds: float) -> None:
        self.patience = 1.5 * seconds + 1
        command = [sys.executable, "-P", "-s", "-X", "utf8", "-m", "cutaway.learn.child"]
        self.process = subprocess.Popen(
            [*command, str(exercise.number), str(seconds), *map(str, paths)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=surroundings(),
            start_new_session=True,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.kept: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.listeners = [
            threading.Thread(target=self.listen, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self.keep, args=(self.process.stderr,), daemon=True),
        ]
        for each in self.listeners:
            each.start()

    def listen(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self.lines.put(line.decode(errors="replace"))
        self.lines.put(None)

    def keep(self, pipe: IO[bytes]) -> None:
        """What is printed: its beginning is kept, all of it is read, so that nobody waits."""
        count = 0
        while part := os.read(pipe.fileno(), 65536):
            if count < SHOWN:
                self.kept.append(part.decode(errors="replace")[: SHOWN - count])
            count += len(part)
        if count > SHOWN:
            self.kept.append(f"\n… {count:,} bytes were printed; the rest is left out")

    @property
    def printed(self) -> str:
        return "".join(self.kept)

    def heard(self, seconds: float) -> dict[str, Any] | None:
        """The next thing it says; nothing where it ended or is silent for too long."""
        try:
            line = self.lines.get(timeout=seconds)
            said = None if line is None else json.loads(line)
        except (queue.Empty, ValueError):
            return None
        return said if isinstance(said, dict) else None

    def answers(self, count: int) -> list[dict[str, Any]]:
        if self.heard(STARTING) is None:
            self.end()
            why = self.printed.strip().splitlines()[-1:] or ["it said nothing"]
            raise ChildError(f"the process that judges exercises did not start: {why[0]}")
        found: list[dict[str, Any]] = []
        while len(found) < count:
            said = self.heard(self.patience)
            if said is None:
                said = {"state": "stopped", "said": self.lost(), "at": "", "verdicts": [], "notes": []}
                return [*found, *[said] * (count - len(found))]
            found.append(said)
        return found

    def lost(self) -> str:
        """Why no answer came."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return f"ran longer than {self.patience:g} s and could not be interrupted: is there a loop that never ends?"
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

    def end(self) -> None:
        """End it, and whatever it started."""
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # all of them are gone
                self.process.kill()
        else:
            self.process.kill()
        self.process.wait()
        for each in self.listeners:
            each.join(timeout=5)


def surroundings() -> dict[str, str]:
    """The same Python with the same packages, one thread, no GPU, no network of models."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**kept, **own, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
