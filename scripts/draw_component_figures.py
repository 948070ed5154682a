"""Makes docs/components/img: one picture a component, drawn from what the library computes.

python scripts/draw_component_figures.py [NAME ...] [--out docs/components/img]

A picture has the name of its page. The same program draws the same bytes again: weights come from seeds or are the
shipped model's, and nothing of the day or the machine is written down.
"""

import argparse
from pathlib import Path

import torch
from component_figures import attention, blocks, inference, positions
from component_figures.figure_style import MATPLOTLIB_STYLE, FigureFn
from matplotlib import rc_context

ROOT = Path(__file__).parents[1]
FIGURES: dict[str, FigureFn] = positions.FIGURES | attention.FIGURES | blocks.FIGURES | inference.FIGURES


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", metavar="NAME", help="pictures to draw; all unless given")
    asked.add_argument("--out", type=Path, default=ROOT / "docs" / "components" / "img")
    asked.add_argument("--format", default="svg", help="png, to look at one")
    given = asked.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names or FIGURES:
        save_figure(name, given.out / f"{name}.{given.format}")


def save_figure(name: str, path: Path) -> None:
    torch.set_num_threads(1)  # sums are then in one order
    torch.manual_seed(0)
    with rc_context(MATPLOTLIB_STYLE):
        svg = path.suffix == ".svg"
        FIGURES[name]().savefig(path, transparent=svg, metadata={"Date": None} if svg else None)


if __name__ == "__main__":
    main()
