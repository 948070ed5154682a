"""Reading what others wrote: regular files of a bounded size, JSON of the right shape, and Rust that may panic."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cutaway.errors import InputError

T = TypeVar("T")
LARGEST = 256 << 20
"""Bytes of the largest file read. The largest published tokenizer.json has about 35 MB."""
MOST_TOKENS = 1 << 22
"""The largest published vocabulary has about 260 thousand tokens."""


def exists(path: Path) -> bool:
    """True for a link to nothing too: such a file is reported, not passed over."""
    return path.is_file() or path.is_symlink()


def read_bytes(path: Path, limit: int = LARGEST) -> bytes:
    """Links are followed, since the hub's cache consists of them, but only to regular files: a device never ends."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file; put the tokenizer's own file there")
        if status.st_size > limit:
            raise InputError(
                f"{path} has {status.st_size:,} bytes, more than the {limit:,} a tokenizer's file may have; "
                "give the directory of a model"
            )
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); check the file and its rights") from error


def read_text(path: Path, limit: int = LARGEST) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); get it again") from error


def read_object(path: Path, limit: int = LARGEST) -> dict[str, Any]:
    return parse_object(read_text(path, limit), path)


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """JSON whose outermost value is an object."""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"{path} is not whole JSON ({why}); get the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object; get the file again")
    return value


def vocabulary(value: object, where: object) -> dict[str, int]:
    """A token → id object, each id a small whole number used once."""
    if not isinstance(value, dict) or not value or len(value) > MOST_TOKENS:
        raise InputError(f"{where} has no vocabulary of tokens and ids; get the file again")
    for token, number in value.items():
        if not isinstance(token, str) or isinstance(number, bool) or not isinstance(number, int):
            raise InputError(f"{where} gives token {token!r} the id {number!r}, not a whole number; get the file again")
        if not 0 <= number < MOST_TOKENS:
            raise InputError(f"{where} gives token {token!r} the id {number}, outside 0 to {MOST_TOKENS - 1}; fix it")
    return value


def in_rust(what: object, call: Callable[[], T]) -> T:
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
