"""Read files of bounded size, for files of untrusted origin."""

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Default of the maximum number of bytes of a file."""


def read_file(path: Path, error: type[Exception], max_bytes: int = MAX_BYTES) -> bytes:
    """Read a file. Raise `error` if it is missing, not a regular file, unreadable or longer than `max_bytes`."""
    data = None
    try:
        if path.is_file() or not path.exists():  # reading a pipe could block, and a device may not end
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise error(f"'{path}' does not exist, so it cannot be read; check the path") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"'{path}' cannot be read: {reason}; check the path and its permissions") from None
    if data is None:
        raise error(f"'{path}' is not a regular file, so it cannot be read; replace it with a file")
    if len(data) > max_bytes:
        raise error(f"'{path}' has more than {max_bytes:,} bytes, the maximum for this kind of file; check the path")
    return data


def read_text_file(path: Path, error: type[Exception], max_bytes: int = MAX_BYTES) -> str:
    """Read a UTF-8 file. Raise `error` as `read_file` does, or if the file is not UTF-8."""
    try:
        return read_file(path, error, max_bytes).decode("utf-8")
    except UnicodeDecodeError as problem:
        where = f"{problem.reason} at byte {problem.start}"
        raise error(f"'{path}' cannot be read as text ({where}); it must be UTF-8") from None


def parse_json_object(text: str, path: Path, error: type[Exception]) -> dict[str, Any]:
    """Parse `text`, the content of the JSON file `path`. Raise `error` if it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else problem
        raise error(f"'{path}' is not valid JSON: {reason}; correct the file or download it again") from None
    if not isinstance(value, dict):
        raise error(f"'{path}' holds a {type(value).__name__}, not a JSON object; correct it or download it again")
    return value


def read_json_object(path: Path, error: type[Exception], max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file. Raise `error` as `read_text_file` does, or if the file is not a JSON object."""
    return parse_json_object(read_text_file(path, error, max_bytes), path, error)
