"""The learner's file, which is a .py file of cells or a Jupyter notebook: write the stub, read the code cells."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutaway.errors import CutawayError, InputError
from cutaway.learn.exercises.exercise_file import Exercise, parse_cells
from cutaway.user_files import write_text_atomically

MAX_FILE_BYTES = 4 << 20
"""Maximum size of a file in bytes. Notebooks with figures are smaller than this."""
_MAGIC_OR_SHELL = re.compile(r"^\s*[%!]")


class FileChangedError(CutawayError):
    """The learner's file is not the one that was read before: it was changed, created or deleted meanwhile."""


@dataclass(frozen=True)
class CodeCell:
    """Python source, and the name of the file or notebook cell that it is from."""

    name: str
    text: str


def read_code_cells(path: Path) -> list[CodeCell]:
    """Read the code cells of a notebook, in order, or a .py file as one cell; raise if the file cannot be read."""
    if not path.exists():
        raise InputError(f"there is no file '{path}'; `cutaway learn start NUMBER` writes one")
    if path.is_dir():
        raise InputError(f"'{path}' is a directory; pass the file that you wrote")
    if path.suffix not in (".py", ".ipynb"):
        raise InputError(f"'{path.name}' is neither a .py nor an .ipynb file; pass the file that you wrote")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InputError(
            f"'{path.name}' has {size:,} bytes; the limit is {MAX_FILE_BYTES:,}; pass the file that you wrote"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"'{path.name}' is not UTF-8 text; save it as UTF-8") from None
    return [CodeCell(path.name, text)] if path.suffix == ".py" else _read_notebook_cells(text, path.name)


def _read_notebook_cells(text: str, name: str) -> list[CodeCell]:
    try:
        cells = list(enumerate(json.loads(text)["cells"], 1))  # `source` is a string, or a list of lines
        code = [(n, "".join(cell["source"])) for n, cell in cells if cell.get("cell_type") == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"'{name}' is not a valid notebook; open it in Jupyter and save it again") from None
    return [CodeCell(f"cell {n}", _strip_magics(source)) for n, source in code]


def _strip_magics(source: str) -> str:
    """Comment out Jupyter magics and shell lines. Line numbers do not change.

    A cell with a cell magic other than %%time, %%timeit and %%capture becomes empty."""
    if source.startswith("%%") and not re.match(r"%%(time|timeit|capture)\b", source):
        return ""
    return "\n".join("# " + line if _MAGIC_OR_SHELL.match(line) else line for line in source.split("\n"))


def to_notebook(text: str) -> dict[str, object]:
    """Convert the text of a .py file of cells to the Jupyter notebook format."""
    return build_notebook(parse_cells(text))


def build_notebook(sources: Sequence[tuple[str, str]]) -> dict[str, object]:
    """Return cells, each a pair of the kind and the text, in the Jupyter notebook format."""
    cells: list[dict[str, object]] = []
    for n, (kind, body) in enumerate(sources):
        cell: dict[str, object] = {
            "cell_type": kind,
            "id": f"cell-{n}",
            "metadata": {},
            "source": body.splitlines(True),
        }
        cells.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write_stub(
    exercise: Exercise, directory: Path, *, as_notebook: bool = False, restart: bool = False
) -> tuple[Path, Path | None]:
    """Write the stub of an exercise to `directory`. Return its path, and the path of the backup or None.

    If the file already exists, it is renamed to the backup path with `restart`, and an error is raised without it.
    """
    path = directory / f"{exercise.slug}.{'ipynb' if as_notebook else 'py'}"
    text = json.dumps(to_notebook(exercise.stub), indent=1, ensure_ascii=False) + "\n" if as_notebook else exercise.stub
    backup = None
    if path.exists():
        if not restart:
            raise InputError(
                f"'{path}' already exists and may contain your work; continue with it, or start over with --restart, "
                "which keeps the old file as a backup"
            )
        backup = backup_path(path)
        path.rename(backup)
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:  # x: never overwrite a file created in the meantime
        file.write(text)
    return path, backup


def backup_path(path: Path) -> Path:
    """Return the first unused path for a backup of `path`, such as 01-attention.old.py or 01-attention.old1.py."""
    names = (path.with_name(f"{path.stem}.old{n or ''}{path.suffix}") for n in range(10_000))
    return next(name for name in names if not name.exists())


def find_learner_file(exercise: Exercise, last_file: str | None, directory: Path = Path("learn")) -> Path | None:
    """Return the exercise's file in `directory` or in the current one, else `last_file` if it exists, else None."""
    default_paths = [
        parent / f"{exercise.slug}.{suffix}" for parent in (directory, Path()) for suffix in ("py", "ipynb")
    ]
    paths = [*default_paths, *([Path(last_file)] if last_file else [])]
    return next((path for path in paths if path.is_file()), None)


def file_version(path: Path) -> str:
    """Return a hash of the file's content, or "" if there is no file."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def replace_learner_text(path: Path, text: str, version: str) -> str:
    """Write a .py file atomically and return its new version. `version` is that of the content that was read before.

    Raises FileChangedError if the file has another version now, so that changes made in another editor are not lost.
    """
    if file_version(path) != version:
        raise FileChangedError(f"'{path}' was changed by another program since it was read; choose which text to keep")
    try:
        write_text_atomically(path.resolve(), text)
    except OSError as error:
        problem = f"'{path}' cannot be written ({error.strerror})"
        raise InputError(f"{problem}; run `cutaway open` in a directory that you can write to") from error
    return file_version(path)
