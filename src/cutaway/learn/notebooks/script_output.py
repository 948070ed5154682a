"""Output of a notebook that runs as a script: each claim is printed, and the figures are saved when the script ends.

Jupyter shows the value of the last expression of a cell and the figures of the cell; Python shows neither. A script is
a notebook if it has cells in percent format.
"""

import ast
import atexit
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from cutaway.learn.notebooks.figures import render_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_DIRECTORY = Path("learn")
"""Directory of the figures, relative to the working directory."""


class ScriptOutput:
    """Prints the claims of a notebook that runs as a script, and saves its figures."""

    def __init__(self, path: Path, tree: ast.Module, namespace: dict[str, Any]) -> None:
        self.path, self.tree, self.namespace = path, tree, namespace
        self.figures: list[Figure] = []
        """All figures that were created since, in order. A list keeps those that no variable refers to."""

    def print_claim(self, claim: object, caller: FrameType) -> None:
        """Print a claim of the script, unless the calling statement prints it."""
        if caller.f_globals is self.namespace and not self._is_printed(caller.f_lineno):
            sys.stdout.write(f"{claim!r}\n")

    def _is_printed(self, line: int) -> bool:
        """Whether the innermost statement at this line is a call of print."""
        statements = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        innermost = max(statements, key=lambda node: (node.lineno, node.col_offset))
        call = innermost.value if isinstance(innermost, ast.Expr) else None
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"

    def record_figures(self) -> None:
        """Record every figure from now on, and save all of them when the script ends."""
        from matplotlib.figure import Figure

        init = Figure.__init__

        def record_and_init(figure: "Figure", *args: Any, **kwargs: Any) -> None:
            init(figure, *args, **kwargs)
            self.figures.append(figure)

        Figure.__init__ = record_and_init  # type: ignore[method-assign,assignment]
        atexit.register(self.save_figures)

    def save_figures(self) -> None:
        for number, figure in enumerate(self.figures, 1):
            FIGURE_DIRECTORY.mkdir(parents=True, exist_ok=True)
            path = FIGURE_DIRECTORY / f"{self.path.stem}-{number}.svg"
            path.write_text(render_svg(figure), encoding="utf-8")
            sys.stdout.write(f"figure: {path}\n")


def detect_notebook_script() -> ScriptOutput | None:
    """Return the output of the running script if it is a notebook; None in Jupyter and for other programs."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or file is None or hasattr(sys, "ps1"):  # an interactive session
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # an executable archive, or a file that was removed
        return None
    if not text.startswith("# %%"):
        return None
    output = ScriptOutput(Path(file), ast.parse(text), vars(main))
    output.record_figures()
    return output


SCRIPT_OUTPUT = detect_notebook_script()
"""Output of the running script. It is detected when `cutaway.learn` is imported, before the first figure is created."""
