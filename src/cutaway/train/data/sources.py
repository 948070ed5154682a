"""Text sources: a file, a directory of files, or Python's standard library."""

import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cutaway.errors import InputError

EXCLUDED_DIRECTORIES = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__pycache__"
}  # fmt: skip
"""Directories of the standard library that are excluded: installed packages, tests (repetitive, and missing on many
systems), pydoc's escaped help texts, and code page tables."""


@dataclass(frozen=True)
class TextSource:
    """A source of training text. If `path` is None, the source is the code of Python's standard library."""

    path: Path | None
    text_column: str = "text"
    """Column with the text."""
    target_column: str | None = None
    """Column with the target, for source-target pairs."""
    weight: float = 1.0
    """Sampling weight of this source relative to the other sources; see `datasets.MixtureDataset`."""
    group_column: str | None = None
    """Column with a group name. All documents of a group are in the same split, training or validation. None: each
    document is assigned to a split on its own."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InputError(f"the weight of a source is {self.weight}; pass a positive number, or remove the source")
        for name in ("target_column", "group_column"):
            if self.path is None and getattr(self, name) is not None:
                raise InputError(
                    f"{name} is set, but Python's standard library has no columns; set path, or remove {name}"
                )

    @property
    def columns(self) -> list[str]:
        """Columns that every row must have."""
        return [self.text_column, *(column for column in (self.target_column, self.group_column) if column is not None)]


class SourceFile(NamedTuple):
    """A file of a source. Size and modification time are used to detect changes."""

    path: Path
    name: str
    """Path relative to the source, with forward slashes. It does not depend on the location of the source."""
    size: int
    mtime_ns: int
    """Modification time in nanoseconds."""


def list_source_files(source: TextSource) -> list[SourceFile]:
    """All files of a source, ordered by name. Hidden files are skipped."""
    if source.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return [file for file in _sorted_files(root, _stdlib_files(root)) if file.size]
    root = source.path.expanduser()
    if root.is_dir():
        files = _sorted_files(root, _walk_files(root))
        if not files:
            raise InputError(f"the directory '{root}' has no files; pass a text file or a directory with text files")
        return files
    if not root.is_file():
        problem = "is neither a file nor a directory" if root.exists() else "does not exist"
        raise InputError(f"'{root}' {problem}; pass a text, JSON Lines, TSV or Parquet file, or a directory of them")
    return _sorted_files(root.parent, [root])


def _walk_files(root: Path) -> Iterator[Path]:
    """Iterate over the files below a directory. Links to directories are not followed, because they may form cycles."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in EXCLUDED_DIRECTORIES]
        # _sysconfigdata contains the build configuration of Python, which differs from machine to machine.
        yield from (Path(directory, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))


def _sorted_files(root: Path, paths: Iterator[Path] | list[Path]) -> list[SourceFile]:
    return sorted((_stat_file(root, path) for path in paths), key=lambda file: file.name)


def _stat_file(root: Path, path: Path) -> SourceFile:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:  # a dangling link or missing permission: the file is counted as skipped when it is read
        return SourceFile(path, name, 0, 0)
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)
