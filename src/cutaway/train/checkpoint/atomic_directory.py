"""Atomic directories. While a directory is written or removed, it has a hidden name; when complete, it is renamed."""

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cutaway.train.checkpoint.failpoints import hit_failpoint

SAVING, REPLACED, REMOVED = "saving", "replaced", "removed"
HIDDEN_NAME_PATTERN = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{SAVING}|{REPLACED}|{REMOVED})-[0-9a-f]{{8}}")


def list_directory(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def hidden_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Flush the entries of a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def temporary_directory(target: Path) -> Iterator[Path]:
    """Context with a hidden, locked directory beside `target`. At the end it is removed, unless it was renamed."""
    temporary = hidden_path(target, SAVING)
    temporary.mkdir()
    try:
        with _try_lock_directory(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # what cannot be removed is found later by its name


def rename_into_place(temporary: Path, target: Path) -> Path | None:
    """Rename a complete directory to `target`.

    If the target exists already, it is renamed to a hidden name, which is returned.
    """
    replaced = None
    if target.exists():
        if not target.is_dir():
            raise FileExistsError(errno.EEXIST, "the target path is a file, not a directory")
        replaced = hidden_path(target, REPLACED)
        target.rename(replaced)
        hit_failpoint("between-renames")
    try:
        temporary.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)
        raise
    return replaced


def remove_hidden_directory(path: Path, recover: Callable[[Path], bool] | None = None) -> list[str]:
    """Remove a hidden directory, unless it is locked by a process or `recover` returns True. Return error messages."""
    try:
        with _try_lock_directory(path) as locked:
            if locked and not (recover is not None and recover(path)):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except FileNotFoundError:
        return []  # the process that had locked it has removed or renamed it
    except OSError as error:
        return [f"could not remove '{path}' ({error.strerror or error})"]
    return []


@contextmanager
def _try_lock_directory(directory: Path) -> Iterator[bool]:
    """Try to lock a directory without waiting, and yield whether this succeeded.

    The lock is released at the end of the context, and also when the process is killed.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:  # another process has the lock, or the file system has no locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)
