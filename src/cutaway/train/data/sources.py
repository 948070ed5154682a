"""Where text comes from: a file, a directory of files, or Python's own standard library."""

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cutaway.errors import InputError

EXCLUDED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "pydoc_data",
    "encodings",
    "__pycache__",
}
"""Folders of the standard library that are left out: what others installed; tests, which many systems do not ship and
which say one thing over and over; a dictionary of escaped help; tables of code pages."""


@dataclass(frozen=True)
class TextSource:
    """Text to learn from. No path means Python's standard library, which is on every machine."""

    path: Path | None
    text_column: str = "text"
    """The column of a row that holds the text."""
    target_column: str | None = None
    """The column that holds the answer, where source and target are pairs."""
    weight: float = 1.0
    """How often it is read beside other sources; see `datasets.MixtureDataset`."""
    group_column: str | None = None
    """The column whose equal values fall to one side of the split; without one, documents fall each by itself."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InputError(f"a source has weight {self.weight}; give a number above 0, or leave the source out")
        for name in ("target_column", "group_column"):
            if self.path is None and getattr(self, name) is not None:
                raise InputError(f"the standard library has no {name}; name a file, or leave {name} out")

    @property
    def columns(self) -> list[str]:
        """What a row must have."""
        return [self.text_column, *(column for column in (self.target_column, self.group_column) if column is not None)]


class SourceFile(NamedTuple):
    """A file of a source, and what shows that it has been changed."""

    path: Path
    name: str
    """Within its source, with forward slashes: the same wherever the source lies."""
    size: int
    mtime_ns: int
    """Nanoseconds."""


def list_source_files(source: TextSource) -> list[SourceFile]:
    """All files of a source, in the order of their names. Hidden ones are passed over."""
    if source.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return [file for file in _sorted_files(root, _stdlib_files(root)) if file.size]
    root = source.path.expanduser()
    if root.is_dir():
        found = _sorted_files(root, _walk_files(root))
        if not found:
            raise InputError(f"'{root}' holds no files; name a file of text or a directory that has some")
        return found
    if not root.is_file():
        why = "is no file and no directory" if root.exists() else "does not exist"
        raise InputError(f"'{root}' {why}; name a file of text, JSON lines or parquet, or a directory of them")
    return _sorted_files(root.parent, [root])


def _walk_files(root: Path) -> Iterator[Path]:
    """Links to directories are not followed: they may lead back."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_DIRECTORIES]
        # _sysconfigdata is a dump of how this Python was compiled, and differs from machine to machine.
        yield from (Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))


def _sorted_files(root: Path, paths: Iterator[Path] | list[Path]) -> list[SourceFile]:
    return sorted((_stat_file(root, path) for path in paths), key=lambda file: file.name)


def _stat_file(root: Path, path: Path) -> SourceFile:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:  # a link to nothing, or no right to look: counted as unreadable when it is to be read
        return SourceFile(path, name, 0, 0)
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)
