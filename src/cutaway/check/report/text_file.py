"""Atomic writing of the output files of a report."""

import tempfile
from pathlib import Path

from cutaway.errors import InputError


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file, atomically: to a temporary file in the same directory, which then replaces `path`."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temp_dir:
            temp_path = Path(temp_dir) / path.name
            temp_path.write_text(text, encoding="utf-8")
            temp_path.replace(path)
    except OSError as error:
        raise InputError(f"'{path}' cannot be written ({error.strerror}); pass another path") from error


def escape_unprintable(text: str) -> str:
    """Escape all unprintable characters except newline and tab, because XML does not allow some of them."""
    return "".join(char if char in "\n\t" or char.isprintable() else repr(char)[1:-1] for char in text)
