"""Lock of a run directory: one process at a time writes its logs and checkpoints."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from cutaway.errors import InputError

LOCK_FILE = "training.lock"
RETRY_SECONDS = 1.0
"""How long `acquire` tries: `is_locked` holds the lock for an instant, and a process that was just killed may still."""


class RunLock:
    """Exclusive lock of a run directory (flock(2)), which the kernel releases when the process ends or is killed.

    The lock file names the process that has the lock. It remains after the run: a file without a lock has no effect.
    """

    def __init__(self, directory: Path, log: Callable[[str], None] = lambda text: None) -> None:
        self.directory, self.log = directory, log
        self._file: TextIO | None = None

    def acquire(self) -> None:
        """Acquire the lock, unless this object has it already. Raises InputError if another one has it."""
        if self._file is not None:
            return
        # Opened for writing, because NFS has no exclusive locks of files that are open for reading only
        file = (self.directory / LOCK_FILE).open("a+", encoding="utf-8")
        try:
            if not _try_lock(file, fcntl.LOCK_EX, RETRY_SECONDS):
                file.seek(0)
                raise InputError(f"'{self.directory}' is being trained by {_describe_holder(file.read())}")
        except InputError:
            file.close()
            raise
        except OSError as error:
            self.log(
                f"the file system of '{self.directory}' has no file locks ({error.strerror}), so a second process that"
                " trains this run would not be refused; do not start one"
            )
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_locked(directory: Path) -> bool | None:
    """Whether a process trains the run in this directory. None if the file system has no locks."""
    try:
        with (directory / LOCK_FILE).open(encoding="utf-8") as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except FileNotFoundError:  # no process has trained the run
        return False
    except OSError:
        return None


def _try_lock(file: TextIO, operation: int, seconds: float = 0.0) -> bool:
    """Try to lock a file for at most `seconds`, and return whether this succeeded. OSError: there are no locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        else:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)


def _describe_holder(text: str) -> str:
    """Describe the process that has the lock, from the contents of the lock file, and what to do."""
    pid, _, host = text.strip().partition(" ")
    because = "a second process would overwrite its logs and checkpoints"
    if not pid.isdecimal():
        return f"another process, and {because}; wait until it has ended"
    if host != socket.gethostname():
        return f"process {pid} on {host}, and {because}; wait until it has ended, or stop it there with `kill {pid}`"
    if int(pid) == os.getpid():
        return "another thread of this process, or a Trainer that it has not finished; wait until it has ended"
    return (
        f"process {pid}, and {because}; wait until it has ended, or stop it with `kill {pid}` (it then saves a"
        " checkpoint) and repeat the command"
    )
