"""Draw docs/components/img and docs/concepts/img: figures of component and concept pages, from computed values.

python scripts/draw_component_figures.py [NAME ...] [--out FOLDER]

A figure has the name of its page. Each component page has one. The output is deterministic: weights come from seeds or
from the pretrained model, and files contain no date.
"""

import argparse
from pathlib import Path

import torch
from component_figures import attention, blocks, inference, information, positions
from component_figures.figure_style import MATPLOTLIB_STYLE, FigureFn
from matplotlib import rc_context

ROOT = Path(__file__).parents[1]
FIGURES: dict[str, FigureFn] = positions.FIGURES | attention.FIGURES | blocks.FIGURES | inference.FIGURES
CONCEPT_FIGURES: dict[str, FigureFn] = information.FIGURES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures to draw; default all")
    parser.add_argument("--out", type=Path, help="default docs/components/img or docs/concepts/img")
    parser.add_argument("--format", default="svg", help="svg or png")
    args = parser.parse_args()
    for name in args.names or FIGURES | CONCEPT_FIGURES:
        folder = args.out or ROOT / "docs" / ("concepts" if name in CONCEPT_FIGURES else "components") / "img"
        folder.mkdir(parents=True, exist_ok=True)
        save_figure(name, folder / f"{name}.{args.format}")


def save_figure(name: str, path: Path) -> None:
    torch.set_num_threads(1)  # deterministic order of summation
    torch.manual_seed(0)
    with rc_context(MATPLOTLIB_STYLE):
        svg = path.suffix == ".svg"
        (FIGURES | CONCEPT_FIGURES)[name]().savefig(path, transparent=svg, metadata={"Date": None} if svg else None)


if __name__ == "__main__":
    main()
