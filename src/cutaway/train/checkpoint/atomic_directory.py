"""Folders that appear whole and disappear whole: while they are written or removed, their names are hidden ones."""

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
    """A new file, and its bytes are on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """The names in a directory, too, are on the disk only once that is asked for."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def temporary_directory(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, gone afterwards unless it was renamed."""
    work = hidden_path(target, SAVING)
    work.mkdir()
    try:
        with _try_lock_directory(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)  # what cannot be removed now is found by its name later


def rename_into_place(temporary: Path, target: Path) -> Path | None:
    """Give a whole folder its name; a folder that had it is returned under a hidden one."""
    old = None
    if target.exists():
        if not target.is_dir():
            raise FileExistsError(errno.EEXIST, "a file that is no checkpoint has its name")
        old = hidden_path(target, REPLACED)
        target.rename(old)
        hit_failpoint("between-renames")
    try:
        temporary.rename(target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    return old


def remove_hidden_directory(path: Path, *, recover: Callable[[Path], bool] = lambda path: False) -> list[str]:
    """Remove a hidden folder, unless it can be rescued or another process is at work on it; says what did not work."""
    try:
        with _try_lock_directory(path) as free:
            if free and not recover(path):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)
    except FileNotFoundError:
        return []  # whoever was at work on it has come to an end
    except OSError as error:
        return [f"'{path}' could not be removed ({error.strerror or error})"]
    return []


@contextmanager
def _try_lock_directory(directory: Path) -> Iterator[bool]:
    """Whether no other process is at work on a folder; a process that dies lets go of it."""
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # held by another; or on a file system without locks, where nobody can know
            free = False
        yield free
    finally:
        os.close(number)
