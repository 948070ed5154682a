"""The learner's file: written as a stub, read as pieces of Python. Either a .py of cells or a Jupyter notebook."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutaway.errors import InputError
from cutaway.learn.exercises.exercise_file import Exercise, parse_cells

MAX_FILE_BYTES = 4 << 20
"""Bytes of a file; a notebook with pictures has fewer."""
_MAGIC_OR_SHELL = re.compile(r"^\s*[%!]")


@dataclass(frozen=True)
class CodeCell:
    """Some lines of Python and what they are called: a file's name, or a cell's."""

    name: str
    text: str


def read_code_cells(path: Path) -> list[CodeCell]:
    """The code of a file in its order."""
    if not path.exists():
        raise InputError(f"there is no file '{path}'; `cutaway learn start` writes one to begin with")
    if path.is_dir():
        raise InputError(f"'{path}' is a directory; name the file in it that you wrote")
    if path.suffix not in (".py", ".ipynb"):
        raise InputError(f"'{path.name}' is neither a .py nor an .ipynb; name the file that you wrote")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InputError(
            f"'{path.name}' has {path.stat().st_size:,} bytes; an exercise has fewer: is it the right file?"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"'{path.name}' is no text in UTF-8; save it as such") from None
    return [CodeCell(path.name, text)] if path.suffix == ".py" else _read_notebook_cells(text, path.name)


def _read_notebook_cells(text: str, name: str) -> list[CodeCell]:
    try:
        cells = json.loads(text)["cells"]
        code = [
            (n, "".join(cell["source"])) for n, cell in enumerate(cells, 1) if cell.get("cell_type") == "code"
        ]  # a source is a text, or a list of its lines
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"'{name}' is no notebook that can be read; open it in Jupyter and save it again") from None
    return [CodeCell(f"cell {n}", _strip_magics(source)) for n, source in code]


def _strip_magics(source: str) -> str:
    """A cell without what only Jupyter understands; lines keep their numbers."""
    if source.startswith("%%") and not re.match(r"%%(time|timeit|capture)\b", source):
        return ""
    return "\n".join("# " + line if _MAGIC_OR_SHELL.match(line) else line for line in source.split("\n"))


def to_notebook(text: str) -> dict[str, Any]:
    """A file of cells as Jupyter stores it."""
    cells = []
    for n, (kind, body) in enumerate(parse_cells(text)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{n}", "metadata": {}, "source": body.splitlines(True)}
        cells.append(cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def write_stub(
    exercise: Exercise, directory: Path, *, as_notebook: bool = False, restart: bool = False
) -> tuple[Path, Path | None]:
    """Write the stub; what stood there is never overwritten, but with `restart` put beside. Both places."""
    path = directory / f"{exercise.slug}.{'ipynb' if as_notebook else 'py'}"
    text = json.dumps(to_notebook(exercise.stub), indent=1, ensure_ascii=False) + "\n" if as_notebook else exercise.stub
    aside = None
    if path.exists():
        if not restart:
            raise InputError(
                f"'{path}' is there already, and may hold your work; go on with it, or begin anew with --restart, "
                "which keeps the old one beside it"
            )
        aside = _backup_path(path)
        path.rename(aside)
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:  # x: what another wrote in the meantime is not overwritten either
        file.write(text)
    return path, aside


def _backup_path(path: Path) -> Path:
    """A name that is free."""
    names = (path.with_name(f"{path.stem}.old{n or ''}{path.suffix}") for n in range(10_000))
    return next(each for each in names if not each.exists())
