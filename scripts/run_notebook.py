"""Runs a notebook from top to bottom and writes it as a page: its prose, its code, what it printed and drew.

python scripts/run_notebook.py notebooks/02_attention.py --out .pages/theory

A notebook is a Python file in jupytext's percent format. It is run as a program; a claim that does not hold ends it.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

MATPLOTLIB_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cutaway",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
}


@dataclass
class NotebookResult:
    """A notebook that ran."""

    page: str
    claims: list[str] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("notebook", type=Path, nargs="+")
    asked.add_argument("--out", type=Path, default=Path(".pages/theory"))
    asked.add_argument("--json", action="store_true", help="say what was found as JSON, one line a notebook")
    given = asked.parse_args()
    for path in given.notebook:
        ran = run_notebook(path, given.out)
        (given.out / f"{path.stem}.md").write_text(ran.page)
        pictures = [picture.name for picture in ran.figures]
        told = {"notebook": path.stem, "claims": ran.claims, "pictures": pictures, "seconds": round(ran.seconds, 1)}
        short = f"{path.stem}: {len(ran.claims)} claims, {len(pictures)} pictures, {ran.seconds:.1f} s"
        print(json.dumps(told) if given.json else short)  # noqa: T201


def run_notebook(path: Path, out: Path) -> NotebookResult:
    """Run the notebook's cells in one namespace; what it sets for gradients and pictures ends with it."""
    out.mkdir(parents=True, exist_ok=True)
    ran, names, start = NotebookResult(""), {"__name__": "__main__"}, time.perf_counter()
    parts: list[str] = []
    with matplotlib.rc_context(MATPLOTLIB_STYLE), torch.enable_grad():
        plt.close("all")
        for place, cell in enumerate(jupytext.read(path).cells):
            if cell.cell_type == "markdown":
                parts.append(cell.source)
                continue
            said, value = run_cell(cell.source, names, f"{path.name}, cell {place}")
            parts.append(f"```python\n{cell.source}\n```")
            ran.claims += [line.removeprefix("✓ ") for line in said.splitlines() if line.startswith("✓ ")]
            if said:
                parts.append(f"```text\n{said}\n```")
            for drawn in open_figures(value):
                picture = out / f"{path.stem}-{len(ran.figures) + 1}.svg"
                drawn.savefig(picture, metadata={"Date": None}, bbox_inches="tight")
                ran.figures.append(picture)
                parts.append(f"![{figure_title(drawn)}]({picture.name})")
            plt.close("all")
    ran.page, ran.seconds = "\n\n".join(parts) + "\n", time.perf_counter() - start
    return ran


def run_cell(code: str, namespace: dict[str, Any], filename: str) -> tuple[str, Any]:
    """What a cell printed, with the value of its last line if that is an expression, as a notebook shows it."""
    printed, value = io.StringIO(), None
    block = ast.parse(code)
    last = block.body.pop() if block.body and isinstance(block.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(block, filename, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)  # noqa: S307
            if value is not None and "matplotlib" not in type(value).__module__:
                print(repr(value))  # noqa: T201
    return printed.getvalue().rstrip(), value


def open_figures(value: Any) -> list[Figure]:
    """Figures that pyplot has open, and one that the cell ended with."""
    opened = [plt.figure(number) for number in plt.get_fignums()]
    return opened + [value] * (isinstance(value, Figure) and value not in opened)


def figure_title(figure: Figure) -> str:
    texts = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next((text for text in texts if text), "figure").replace("\n", " ")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
