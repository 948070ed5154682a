"""Execute a notebook and write it as a Markdown page with text, code, outputs and figures.

python scripts/run_notebook.py notebooks/02_attention.py --out .pages/theory

A notebook is a Python file in jupytext's percent format. A claim that does not hold stops the run with an error.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cutaway.learn.notebooks import Notebook
from cutaway.learn.notebooks.execution import run_cells


@dataclass
class NotebookPage:
    """Markdown page of an executed notebook, its claims, the paths of its figures, and the run time."""

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


def run_notebook(path: Path, out: Path) -> NotebookPage:
    """Run the cells of a notebook in one namespace, and save its figures in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    result = run_cells(Notebook(path, path.read_text(encoding="utf-8")).cells, path.name)
    page = NotebookPage("", result.claims, seconds=result.seconds)
    parts: list[str] = []
    for cell in result.cells:
        parts.append(cell.source if cell.kind == "markdown" else f"```python\n{cell.source}\n```")
        if cell.output:
            parts.append(f"```text\n{cell.output}\n```")
        for figure in cell.figures:
            figure_path = out / f"{path.stem}-{len(page.figures) + 1}.svg"
            figure_path.write_text(figure.svg, encoding="utf-8")
            page.figures.append(figure_path)
            parts.append(f"![{figure.title}]({figure_path.name})")
    page.page = "\n\n".join(parts) + "\n"
    return page


if __name__ == "__main__":
    main()
