"""Files in the user's cache and state directories, written atomically."""

import os
from contextlib import suppress
from pathlib import Path


def user_cache_dir() -> Path:
    """Directory of measurements and prepared data: $CUTAWAY_CACHE, or `cutaway` in the user's cache directory."""
    return _user_directory("CUTAWAY_CACHE", "XDG_CACHE_HOME", "~/.cache")


def user_state_dir() -> Path:
    """Directory of the learner's progress: $CUTAWAY_HOME, or `cutaway` in the user's state directory."""
    return _user_directory("CUTAWAY_HOME", "XDG_STATE_HOME", "~/.local/state")


def _user_directory(variable: str, xdg_variable: str, default: str) -> Path:
    override = os.environ.get(variable)
    directory = Path(override) if override else Path(os.environ.get(xdg_variable) or default) / "cutaway"
    try:
        return directory.expanduser()
    except RuntimeError:  # no home directory, as in many containers
        return directory


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file and create its directory. A reader sees the old or the complete new file, even after a crash."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # the directory may be unreachable
            temporary.unlink()
        raise
