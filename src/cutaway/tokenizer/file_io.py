"""Tokenizer file I/O: reads of bounded size, atomic writes, and InputError for errors of the tokenizers library."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from cutaway.errors import InputError

T = TypeVar("T")

JsonObject = dict[str, object]
CHAT_TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 256 << 20
"""Maximum file size in bytes. The largest published tokenizer.json has about 35 MB."""
MAX_VOCAB_SIZE = 1 << 22
"""Maximum vocabulary size. The largest published vocabulary has about 260 thousand tokens."""


def path_exists(path: Path) -> bool:
    """Whether a file exists. Also True for a broken symlink, so that reading it reports an error."""
    return path.is_file() or path.is_symlink()


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file of at most `max_bytes`. Symlinks are followed, as the Hub cache consists of symlinks."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file; replace it with the tokenizer file")
        if status.st_size > max_bytes:
            limit = f"more than the maximum of {max_bytes:,} for a tokenizer file"
            raise InputError(f"{path} has {status.st_size:,} bytes, {limit}; pass a model directory")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str:
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise InputError(f"{path} is not UTF-8 text ({where}); download it again") from error


def read_json_object(path: Path, max_bytes: int = MAX_FILE_BYTES) -> JsonObject:
    return parse_json_object(read_text(path, max_bytes), path)


def parse_json_object(text: str, path: Path) -> JsonObject:
    """Parse JSON and raise unless it is an object."""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path} is not valid JSON ({reason}); download the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} contains a JSON {type(value).__name__}, not an object; download the file again")
    return value


def wrap_tokenizers_errors(what: object, call: Callable[[], T], advice: str = "download the files again") -> T:
    """Return `call()`. Raise errors of the tokenizers library (`Exception`s and Rust panics) as InputErrors."""
    try:
        return call()
    except InputError:
        raise
    except BaseException as error:
        # A Rust panic is a pyo3_runtime.PanicException, a BaseException that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"the tokenizers library rejects {what} ({error}); {advice}") from error


def write_files_atomically(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write all files under temporary names, then rename them when all are on disk."""
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
        raise InputError(f"the tokenizer cannot be saved to {directory} ({error}); pass another directory") from error
    finally:
        for temporary_path, _ in staged:
            temporary_path.unlink(missing_ok=True)
