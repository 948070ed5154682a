"""Storage of the learner's progress: one JSON file per name in the user's state directory, written atomically."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError, format_error


class ProgressStoreError(CutawayError):
    """A progress file cannot be read or written."""


def state_directory() -> Path:
    """Return $CUTAWAY_HOME, or the `cutaway` directory in the user's state directory."""
    home = os.environ.get("CUTAWAY_HOME")
    directory = Path(home) if home else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "cutaway"
    try:
        return directory.expanduser()
    except RuntimeError:  # no home directory, as in many containers
        return directory


def read_progress(name: str, is_valid: Callable[[Any], bool]) -> tuple[dict[str, Any], Path | None]:
    """Read the progress stored under a name. A damaged file is renamed, and its new path returned."""
    path = state_directory() / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # nothing stored; if the path is unusable, `write_progress` raises
        return {}, None
    except (ValueError, RecursionError):
        data = None
    except OSError as error:  # the file exists and must not be overwritten
        raise ProgressStoreError(
            f"'{path}' cannot be read: {format_error(error)}; set CUTAWAY_HOME to another directory"
        ) from error
    if isinstance(data, dict) and is_valid(data):
        return data, None
    damaged_path = path.with_name(f"{name}.damaged-{datetime.now():%Y%m%d-%H%M%S}.json")
    try:
        path.replace(damaged_path)
    except OSError:  # the directory is read-only: the file is not moved
        damaged_path = path
    return {}, damaged_path


def write_progress(name: str, data: dict[str, Any]) -> Path:
    """Write the progress under a name, atomically: a reader gets the old or the new file, also after a crash."""
    path = state_directory() / f"{name}.json"
    temporary_path = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary_path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary_path.replace(path)
    except OSError as error:
        with suppress(OSError):  # the directory may be unreachable
            temporary_path.unlink()
        raise ProgressStoreError(
            f"progress cannot be saved in '{path.parent}': {format_error(error)}; "
            "set CUTAWAY_HOME to a writable directory"
        ) from error
    return path
