"""Files of a text source: a file, a directory of files, or Python's standard library."""

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cutaway.errors import InputError
from cutaway.train.recipe.schema import STDLIB_PATH, SourceConfig

EXCLUDED_DIRECTORIES = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__pycache__"
}  # fmt: skip
"""Directories of the standard library that are excluded: installed packages, tests (repetitive, and missing on many
systems), pydoc's escaped help texts, and code page tables."""


class SourceFile(NamedTuple):
    """A file of a source. Size and modification time are used to detect changes."""

    path: Path
    name: str
    """Path relative to the source, with forward slashes. It does not depend on the location of the source."""
    size: int
    mtime_ns: int
    """Modification time in nanoseconds."""


def list_source_files(source: SourceConfig) -> list[SourceFile]:
    """All files of a source, ordered by name. Hidden files are skipped."""
    if not source.path:
        columns = "" if source.target_column is None else " (.tsv or .jsonl, with a source and a target in each row)"
        raise InputError(
            f"data.sources[].path is empty, because the recipe has no text; pass files with --text{columns}"
        )
    if source.path == STDLIB_PATH:
        if len(source.columns) > 1:
            raise InputError(
                "data.sources[] has a target_column or group_column, but Python's standard library has no columns; set"
                " path, or remove the column"
            )
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata contains the build configuration of Python, which differs from machine to machine.
        paths = [path for path in _walk_files(root, EXCLUDED_DIRECTORIES) if not path.name.startswith("_sysconfigdata")]
        return [file for file in _sorted_files(root, paths) if file.size and file.name.endswith(".py")]
    root = Path(source.path).expanduser()
    if root.is_dir():
        files = _sorted_files(root, _walk_files(root, {"__pycache__"}))
        if not files:
            raise InputError(f"the directory '{root}' has no files; pass a text file or a directory with text files")
        return files
    if not root.is_file():
        problem = "is neither a file nor a directory" if root.exists() else "does not exist"
        raise InputError(f"'{root}' {problem}; pass a text, JSON Lines, TSV or Parquet file, or a directory of them")
    return _sorted_files(root.parent, [root])


def _walk_files(root: Path, excluded: Collection[str]) -> Iterator[Path]:
    """Iterate over the files below a directory, except hidden ones. Links to directories are not followed."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".") and name not in excluded]
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _sorted_files(root: Path, paths: Iterable[Path]) -> list[SourceFile]:
    return sorted((_stat_file(root, path) for path in paths), key=lambda file: file.name)


def _stat_file(root: Path, path: Path) -> SourceFile:
    name = path.relative_to(root).as_posix()
    try:
        status = path.stat()
    except OSError:  # a dangling link or missing permission: the file is counted as skipped when it is read
        return SourceFile(path, name, 0, 0)
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)
