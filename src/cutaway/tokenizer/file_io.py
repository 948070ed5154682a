"""Tokenizer file I/O: reads of bounded size, atomic writes, and InputError for errors of the tokenizers library."""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from cutaway import bounded_files
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


read_bytes = partial(bounded_files.read_file, error=InputError, max_bytes=MAX_FILE_BYTES)
read_text = partial(bounded_files.read_text_file, error=InputError, max_bytes=MAX_FILE_BYTES)
read_json_object = partial(bounded_files.read_json_object, error=InputError, max_bytes=MAX_FILE_BYTES)


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
