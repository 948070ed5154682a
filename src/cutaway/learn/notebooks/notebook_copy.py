"""Copies of notebooks to read and change: a Jupyter notebook or an HTML page. This module does not import torch."""

import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cutaway.errors import InputError
from cutaway.learn.exercises.learner_file import backup_path, build_notebook
from cutaway.learn.notebooks import Notebook, load_notebooks
from cutaway.learn.notebooks.cell_result import CellResult

CopyFormat = Literal["ipynb", "html"]
_LINK = re.compile(r"\]\((\d\d_\w+)\.py")
_DIGEST = re.compile(r"<!-- sha256 ([0-9a-f]{64}) -->\n\Z")
_JUPYTER_MODULES = {"jupyterlab": "lab", "notebook": "notebook"}


@dataclass(frozen=True)
class NotebookCopy:
    """A copy of a notebook: its path, and the path to which a changed file of this name was renamed."""

    path: Path
    previous_file: Path | None = None
    is_new: bool = True
    """False if the file already existed with the same contents."""


def find_jupyter() -> list[str] | None:
    """Return the command that starts Jupyter, or None if Jupyter is not installed."""
    for module, name in _JUPYTER_MODULES.items():
        if importlib.util.find_spec(module) is not None:
            return [sys.executable, "-m", "jupyter", name]
    names = ((program, program.removeprefix("jupyter-")) for program in ("jupyter-lab", "jupyter-notebook"))
    return next((["jupyter", name] for program, name in names if shutil.which(program)), None)


def copy_path(notebook: Notebook, directory: Path, copy_format: CopyFormat) -> Path:
    return directory / f"{notebook.name}.{copy_format}"


def write_copy(
    notebook: Notebook, cells: Sequence[CellResult], directory: Path, copy_format: CopyFormat, *, restart: bool = False
) -> NotebookCopy:
    """Write a copy to `directory`. A file that was changed since it was written is renamed with `restart`.

    Without `restart`, an error is raised for such a file.
    """
    text = _render_ipynb(notebook, cells) if copy_format == "ipynb" else _render_html(notebook, cells)
    path, previous_file = copy_path(notebook, directory, copy_format), None
    if path.exists():
        old_text = path.read_text(encoding="utf-8", errors="replace")
        if old_text == text:
            return NotebookCopy(path, is_new=False)
        if not _is_unchanged(old_text, copy_format):
            if not restart:
                raise InputError(
                    f"'{path}' was changed since it was written; continue with it, or write a new copy with --restart, "
                    "which keeps the old file as a backup"
                )
            previous_file = backup_path(path)
            path.rename(previous_file)
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return NotebookCopy(path, previous_file)


def missing_links(notebook: Notebook, directory: Path, copy_format: CopyFormat) -> list[int]:
    """Return the numbers of the notebooks to which this one links and that have no copy in `directory`."""
    names = {name for _, source in notebook.cells for name in _LINK.findall(source)}
    linked = [other for other in load_notebooks() if other.name in names and other.name != notebook.name]
    return [other.number for other in linked if not copy_path(other, directory, copy_format).exists()]


def _render_html(notebook: Notebook, cells: Sequence[CellResult]) -> str:
    from cutaway.learn.notebooks.html_page import render_page

    command = f"`cutaway learn notebook {notebook.number} --run`"
    note = "" if any(cell.output for cell in cells) else f"*The code was not run. {command} adds outputs and figures.*"
    page = render_page(notebook, cells, link=lambda name: f"{name}.html", note=note)
    return f"{page}<!-- sha256 {_digest(page)} -->\n"


def _render_ipynb(notebook: Notebook, cells: Sequence[CellResult]) -> str:
    sources = [(cell.kind, _LINK.sub(r"](\1.ipynb", cell.source)) for cell in cells]
    document: dict[str, Any] = build_notebook(sources)
    for data, cell in zip(document["cells"], cells, strict=True):
        if cell.kind == "code":
            data["outputs"] = _ipynb_outputs(cell)
    document["metadata"]["cutaway"] = {"sha256": _digest(_canonical_json(document["cells"]))}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _ipynb_outputs(cell: CellResult) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if cell.output:
        text = (cell.output + "\n").splitlines(True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for figure in cell.figures:
        data = {"image/svg+xml": figure.svg.splitlines(True), "text/plain": [figure.title]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def _is_unchanged(text: str, copy_format: CopyFormat) -> bool:
    """Whether the digest stored in a copy matches its contents."""
    if copy_format == "html":
        match = _DIGEST.search(text)
        return match is not None and match[1] == _digest(text[: match.start()])
    try:
        document = json.loads(text)
        return bool(document["metadata"]["cutaway"]["sha256"] == _digest(_canonical_json(document["cells"])))
    except (ValueError, KeyError, TypeError):
        return False


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
