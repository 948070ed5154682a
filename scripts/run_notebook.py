"""Execute a notebook and write it as a Markdown page with text, code, outputs and figures.

python scripts/run_notebook.py notebooks/02_attention.py --out .pages/theory

A notebook is a Python file in jupytext's percent format. A claim that does not hold stops the run with an error.
"""

import argparse
import ast
import contextlib
import io
import json
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
    """Result of an executed notebook."""

    page: str
    claims: list[str] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(".pages/theory"))
    parser.add_argument("--json", action="store_true", help="print one JSON object per notebook")
    args = parser.parse_args()
    # The models are tiny: on a busy machine a training step with two threads takes ten times as long as with one.
    torch.set_num_threads(1)
    for path in args.notebook:
        result = run_notebook(path, args.out)
        (args.out / f"{path.stem}.md").write_text(result.page)
        figures = [figure.name for figure in result.figures]
        summary = {
            "notebook": path.stem,
            "claims": result.claims,
            "figures": figures,
            "seconds": round(result.seconds, 1),
        }
        line = f"{path.stem}: {len(result.claims)} claims, {len(figures)} figures, {result.seconds:.1f} s"
        print(json.dumps(summary) if args.json else line)  # noqa: T201


def run_notebook(path: Path, out: Path) -> NotebookResult:
    """Run the cells of a notebook in one namespace, and save its figures in `out`.

    Gradient mode and matplotlib settings are restored afterwards.
    """
    out.mkdir(parents=True, exist_ok=True)
    result, namespace, start = NotebookResult(""), {"__name__": "__main__"}, time.perf_counter()
    parts: list[str] = []
    with matplotlib.rc_context(MATPLOTLIB_STYLE), torch.enable_grad():
        plt.close("all")
        for index, cell in enumerate(jupytext.read(path).cells):
            if cell.cell_type == "markdown":
                parts.append(cell.source)
                continue
            output, value = run_cell(cell.source, namespace, f"{path.name}, cell {index}")
            parts.append(f"```python\n{cell.source}\n```")
            result.claims += [line.removeprefix("✓ ") for line in output.splitlines() if line.startswith("✓ ")]
            if output:
                parts.append(f"```text\n{output}\n```")
            for figure in open_figures(value):
                figure_path = out / f"{path.stem}-{len(result.figures) + 1}.svg"
                figure.savefig(figure_path, metadata={"Date": None}, bbox_inches="tight")
                result.figures.append(figure_path)
                parts.append(f"![{figure_title(figure)}]({figure_path.name})")
            plt.close("all")
    result.page, result.seconds = "\n\n".join(parts) + "\n", time.perf_counter() - start
    return result


def run_cell(code: str, namespace: dict[str, Any], filename: str) -> tuple[str, Any]:
    """Run a cell. Return its output, and the value of its last statement if that is an expression, else None.

    The output includes the repr of that value.
    """
    stdout, value = io.StringIO(), None
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(stdout):
        exec(compile(tree, filename, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)  # noqa: S307
            if value is not None and "matplotlib" not in type(value).__module__:
                print(repr(value))  # noqa: T201
    return stdout.getvalue().rstrip(), value


def open_figures(value: Any) -> list[Figure]:
    """Return the open pyplot figures, and `value`, the value of a cell, if it is another figure."""
    opened = [plt.figure(number) for number in plt.get_fignums()]
    return opened + [value] * (isinstance(value, Figure) and value not in opened)


def figure_title(figure: Figure) -> str:
    texts = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next((text for text in texts if text), "figure").replace("\n", " ")


if __name__ == "__main__":
    main()
