"""Bounded reads of a tokenizer's files, atomic writes, and the tokenizers library's errors as ours."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cutaway.errors import InputError

T = TypeVar("T")

CHAT_TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 256 << 20
"""Bytes of the largest file read. The largest published tokenizer.json has about 35 MB."""
MAX_VOCAB_SIZE = 1 << 22
"""The largest published vocabulary has about 260 thousand tokens."""


def path_exists(path: Path) -> bool:
    """True for a link to nothing too: such a file is reported, not passed over."""
    return path.is_file() or path.is_symlink()


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Links are followed, since the hub's cache consists of them, but only to regular files: a device never ends."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file; put the tokenizer's own file there")
        if status.st_size > max_bytes:
            raise InputError(
                f"{path} has {status.st_size:,} bytes, more than the {max_bytes:,} a tokenizer's file may have; "
                "give the directory of a model"
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); check the file and its rights") from error


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); get it again") from error


def read_json_object(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    return parse_json_object(read_text(path, max_bytes), path)


def parse_json_object(text: str, path: Path) -> dict[str, Any]:
    """JSON whose outermost value is an object."""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path} is not whole JSON ({why}); get the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object; get the file again")
    return value


def wrap_tokenizers_errors(what: object, call: Callable[[], T]) -> T:
    """Call the tokenizers library, whose errors are bare `Exception`s and whose panics are not even those."""
    try:
        return call()
    except InputError:
        raise
    except BaseException as error:
        # A panic arrives as pyo3_runtime.PanicException, which cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what} is refused by the tokenizers library ({error}); get the files again") from error


def write_files_atomically(directory: Path, files: Mapping[str, bytes]) -> None:
    """Each beside its place first, and moved there when all are whole on the disk."""
    staged: list[tuple[Path, Path]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
            staged.append((Path(temporary), directory / name))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
        for temporary_path, final in staged:
            temporary_path.replace(final)
        if CHAT_TEMPLATE_FILE not in files:
            (directory / CHAT_TEMPLATE_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"the tokenizer cannot be written to {directory} ({error}); give another directory") from error
    finally:
        for temporary_path, _ in staged:
            temporary_path.unlink(missing_ok=True)
