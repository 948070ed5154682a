"""What is remembered of a learner: one JSON file in the user's state folder, whole or not there at all."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from cutaway.errors import CutawayError, format_error


class ProgressStoreError(CutawayError):
    """The file cannot be read or written."""


def state_directory() -> Path:
    """Where CUTAWAY_HOME points, or the user's state folder."""
    given = os.environ.get("CUTAWAY_HOME")
    place = Path(given) if given else Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "cutaway"
    try:
        return place.expanduser()
    except RuntimeError:  # a user without a home, as in many containers
        return place


def read_progress(name: str, is_valid: Callable[[Any], bool]) -> tuple[dict[str, Any], Path | None]:
    """What is kept under a name; a file that is damaged is set aside, and its new place told."""
    path = state_directory() / f"{name}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # nothing was kept; where nothing can be, `write_progress` says why
        return {}, None
    except (ValueError, RecursionError):
        found = None
    except OSError as error:  # something is there: it is not to be written over
        raise ProgressStoreError(
            f"'{path}' cannot be read: {format_error(error)}; set CUTAWAY_HOME to another folder"
        ) from error
    if isinstance(found, dict) and is_valid(found):
        return found, None
    aside = path.with_name(f"{name}.damaged-{datetime.now():%Y%m%d-%H%M%S}.json")
    try:
        path.replace(aside)
    except OSError:  # a folder that cannot be written: it stays where it is
        aside = path
    return {}, aside


def write_progress(name: str, data: dict[str, Any]) -> Path:
    """Keep it. Whoever reads meanwhile, or comes after a kill, finds the old file or the new one."""
    path = state_directory() / f"{name}.json"
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):  # as unreachable as the rest
            draft.unlink()
        raise ProgressStoreError(
            f"progress cannot be kept in '{path.parent}': {format_error(error)}; set CUTAWAY_HOME to a folder of yours"
        ) from error
    return path
