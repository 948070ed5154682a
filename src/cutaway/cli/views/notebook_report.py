"""Terminal reports of `cutaway learn notebook`."""

from typing import Any

from rich.markup import escape
from rich.text import Text

from cutaway.cli.views.terminal import build_console, indent
from cutaway.learn.notebooks.notebook_copy import NotebookCopy


def render_notebook_list(rows: list[dict[str, Any]]) -> None:
    out = build_console()
    for row in rows:
        out.print(Text.assemble((f"{row['number']:>2}  ", "cyan"), (row["title"], "bold")))
        out.print(indent(indent(Text(row["about"], "dim"))))
    out.print("[dim]`cutaway learn notebook 1` copies one as a Jupyter notebook or an HTML page; --run runs it.[/dim]")


def render_copy(row: dict[str, Any], copy: NotebookCopy, missing_links: list[int], jupyter: list[str] | None) -> None:
    """Print where the copy is, how to open it, and to which notebooks it links that have no copy."""
    out = build_console()
    out.print(Text(f"{row['number']} · {row['title']}", "bold"))
    if "claims" in row:
        for claim in row["claims"]:
            out.print(indent(Text.assemble(("✓ ", "green"), claim["statement"])))
            out.print(indent(indent(Text(claim["result"], "dim"))))
        out.print(f"  {len(row['claims'])} claims hold, {row['figures']} figures, {row['seconds']} s")
    if copy.previous_file is not None:
        out.print(f"The old file is renamed to '{escape(str(copy.previous_file))}'.", soft_wrap=True)
    verb = "Written to" if copy.is_new else "Unchanged:"
    out.print(f"{verb} '{escape(str(copy.path))}'. Open it in {_how_to_open(row, jupyter)}", soft_wrap=True)
    if missing_links:
        numbers = ", ".join(map(str, missing_links))
        out.print(f"[dim]It links to notebooks {numbers}, which `cutaway learn notebook --all` copies too.[/dim]")


def _how_to_open(row: dict[str, Any], jupyter: list[str] | None) -> str:
    if row["format"] == "html":
        return f"a browser, or with `cutaway learn notebook {row['number']} --open`."
    if jupyter is None:
        return "an editor for notebooks, such as VS Code, or install Jupyter: `pip install jupyterlab`."
    return f"Jupyter: `jupyter {jupyter[-1]} {escape(row['file'])}`, or pass --open."


def render_failed_claim(number: int, error: Exception) -> None:
    build_console().print(Text.assemble((f"✗ notebook {number}: ", "bold red"), str(error)))
