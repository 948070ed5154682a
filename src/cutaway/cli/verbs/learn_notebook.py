"""`cutaway learn notebook`: list the theory notebooks, and copy, run or open one. This module does not import torch."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option
from cutaway.cli.verbs.learn import create_directory, select_number
from cutaway.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cutaway.learn.notebooks import Notebook
    from cutaway.learn.notebooks.execution import NotebookResult
    from cutaway.learn.notebooks.notebook_copy import CopyFormat


def _parse_notebook(text: str) -> int:
    from cutaway.learn.notebooks import load_notebooks

    return select_number(text, {book.number: book.title for book in load_notebooks()})


def notebook(
    number: Annotated[
        int | None,
        argument(
            "Number of the notebook, or words of its title; default: list all.",
            show_default=False,
            parser=_parse_notebook,
            metavar="NOTEBOOK",
        ),
    ] = None,
    all_notebooks: Annotated[bool, option("Copy all notebooks.", "--all")] = False,
    directory: Annotated[Path, option("Directory of the copy.", "--dir")] = Path("learn"),
    copy_format: Annotated[
        Literal["ipynb", "html"] | None,
        option("Format of the copy; default ipynb if Jupyter is installed, else html.", "--format"),
    ] = None,
    run: Annotated[bool, option("Run the code, and include outputs and figures.", "--run")] = False,
    open_copy: Annotated[bool, option("Open the copy in Jupyter or a browser.", "--open")] = False,
    restart: Annotated[bool, option("Write a new copy; a changed old one is renamed.", "--restart")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the theory notebooks, or copy one as a Jupyter notebook or an HTML page.

    Example: cutaway learn notebook

    Example: cutaway learn notebook 5 --run --open
    """
    from cutaway.learn.notebooks import get_notebook, load_notebooks
    from cutaway.learn.notebooks.notebook_copy import find_jupyter

    if number is None and not all_notebooks:
        _list_notebooks(as_json=as_json)
        return
    if open_copy and number is None:
        raise InputError("--open opens one notebook; pass its number")
    selected = load_notebooks() if number is None else (get_notebook(number),)
    chosen_format: CopyFormat = copy_format or ("ipynb" if find_jupyter() else "html")
    rows = [
        _copy_notebook(book, directory, chosen_format, run=run, restart=restart, may_exist=open_copy, quiet=as_json)
        for book in selected
    ]
    if as_json:
        print_json(rows[0] if number is not None else rows)
    if open_copy:
        _open_file(Path(rows[0]["file"]), chosen_format)


def _list_notebooks(*, as_json: bool) -> None:
    from cutaway.learn.notebooks import load_notebooks

    rows = [
        {"number": book.number, "name": book.name, "title": book.title, "about": book.about}
        for book in load_notebooks()
    ]
    if as_json:
        print_json(rows)
        return
    from cutaway.cli.views.notebook_report import render_notebook_list

    render_notebook_list(rows)


def _copy_notebook(
    book: "Notebook",
    directory: Path,
    copy_format: "CopyFormat",
    *,
    run: bool,
    restart: bool,
    may_exist: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Write a copy of one notebook, and return it as JSON values. With `may_exist`, an existing copy is kept."""
    from cutaway.cli.views import notebook_report
    from cutaway.learn.notebooks import notebook_copy
    from cutaway.learn.notebooks.cell_result import CellResult

    path = notebook_copy.copy_path(book, directory, copy_format)
    row: dict[str, Any] = {"number": book.number, "title": book.title, "format": copy_format, "file": str(path)}
    if may_exist and path.exists() and not run and not restart:
        return row | {"previous_file": None}
    cells: Sequence[CellResult] = [CellResult(kind, source) for kind, source in book.cells]
    if run:
        result = _run_notebook(book, quiet=quiet)
        cells, claims = result.cells, result.claim_results
        row |= {"claims": [{"statement": statement, "result": measured} for statement, measured in claims]}
        row |= {"figures": len(result.figures), "seconds": round(result.seconds, 1)}
    create_directory(directory)
    copy = notebook_copy.write_copy(book, cells, directory, copy_format, restart=restart)
    if not quiet:
        missing = notebook_copy.missing_links(book, directory, copy_format)
        notebook_report.render_copy(row, copy, missing, notebook_copy.find_jupyter())
    return row | {"previous_file": None if copy.previous_file is None else str(copy.previous_file)}


def _run_notebook(book: "Notebook", *, quiet: bool) -> "NotebookResult":
    """Run a notebook. A claim that does not hold ends the program with exit code 1."""
    import torch

    from cutaway.cli.views.notebook_report import render_failed_claim
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.learn.claim import ClaimError
    from cutaway.learn.notebooks.execution import run_cells

    torch.set_num_threads(1)  # the models are tiny: more threads are slower on a busy machine
    try:
        with progress_bar(f"notebook {book.number}", quiet=quiet) as update:
            return run_cells(book.cells, book.path.name, update)
    except ClaimError as error:
        render_failed_claim(book.number, error)
        raise typer.Exit(1) from None


def _open_file(path: Path, copy_format: "CopyFormat") -> None:
    from cutaway.learn.notebooks.notebook_copy import find_jupyter

    if copy_format == "html":
        import webbrowser

        is_open = webbrowser.open(path.resolve().as_uri())
        typer.echo(f"'{path}' is open in a browser." if is_open else f"No browser was found; open '{path}' in one.")
        return
    command = find_jupyter()
    if command is None:
        raise InputError("Jupyter is not installed; install it with `pip install jupyterlab`, or pass --format html")
    subprocess.run([*command, str(path)], check=False)
