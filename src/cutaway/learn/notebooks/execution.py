"""Execute the cells of a notebook in one namespace, and collect outputs and figures. This module imports torch."""

import ast
import contextlib
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import torch

from cutaway.learn.notebooks.cell_result import CellResult, SvgFigure
from cutaway.learn.notebooks.figures import FIGURE_STYLE, figure_title, open_figures, render_svg


@dataclass(frozen=True)
class NotebookResult:
    """An executed notebook: its cells, and the run time in seconds."""

    cells: tuple[CellResult, ...]
    seconds: float

    @property
    def claim_results(self) -> list[tuple[str, str]]:
        """Statement, and prediction and measurement, of all claims that the notebook printed."""
        lines = [line for cell in self.cells for line in cell.output.splitlines()]
        pairs = zip(lines, [*lines[1:], ""], strict=True)
        return [(line.removeprefix("✓ "), result.strip()) for line, result in pairs if line.startswith("✓ ")]

    @property
    def claims(self) -> list[str]:
        """Statements of all claims that the notebook printed."""
        return [statement for statement, _ in self.claim_results]

    @property
    def figures(self) -> list[SvgFigure]:
        return [figure for cell in self.cells for figure in cell.figures]


def run_cells(
    cells: Sequence[tuple[str, str]], name: str, progress: Callable[[int, int], None] | None = None
) -> NotebookResult:
    """Run the cells of a notebook; raise if a cell raises an error, such as ClaimError.

    `name` is the file name in tracebacks. Gradient mode and matplotlib settings are restored afterwards, and figures
    are closed.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    results, start = list[CellResult](), time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(matplotlib.rc_context(FIGURE_STYLE))
        stack.enter_context(torch.enable_grad())
        stack.callback(plt.close, "all")  # also if a cell raises an error
        plt.close("all")
        for index, (kind, source) in enumerate(cells):
            if progress is not None:
                progress(index, len(cells))
            if kind == "markdown":
                results.append(CellResult(kind, source))
                continue
            output, value = _run_cell(source, namespace, f"{name}, cell {index}")
            figures = tuple(SvgFigure(figure_title(figure), render_svg(figure)) for figure in open_figures(value))
            results.append(CellResult(kind, source, output, figures))
            plt.close("all")
    return NotebookResult(tuple(results), time.perf_counter() - start)


def _run_cell(code: str, namespace: dict[str, Any], filename: str) -> tuple[str, object]:
    """Run a cell. Return its output, and the value of its last statement if that is an expression, else None.

    The output includes the repr of that value.
    """
    stdout, value = io.StringIO(), None
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(stdout):
        exec(compile(tree, filename, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)  # noqa: S307
            if value is not None and "matplotlib" not in type(value).__module__:
                print(repr(value))  # noqa: T201
    return stdout.getvalue().rstrip(), value
