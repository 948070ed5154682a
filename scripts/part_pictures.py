"""Makes docs/parts/img: one picture a part, drawn from what the library computes.

python scripts/part_pictures.py [NAME ...] [--out docs/parts/img]

A picture has the name of its page. The same program draws the same bytes again: weights come from seeds or are the
shipped model's, and nothing of the day or the machine is written down.
"""

import argparse
from pathlib import Path

import torch
from matplotlib import rc_context
from part_drawings import attention, blocks, inference, positions
from part_drawings.paper import STYLE, Drawing

ROOT = Path(__file__).parents[1]
DRAWINGS: dict[str, Drawing] = positions.DRAWINGS | attention.DRAWINGS | blocks.DRAWINGS | inference.DRAWINGS


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", metavar="NAME", help="pictures to draw; all unless given")
    asked.add_argument("--out", type=Path, default=ROOT / "docs" / "parts" / "img")
    asked.add_argument("--format", default="svg", help="png, to look at one")
    given = asked.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names or DRAWINGS:
        draw(name, given.out / f"{name}.{given.format}")


def draw(name: str, path: Path) -> None:
    torch.set_num_threads(1)  # sums are then in one order
    torch.manual_seed(0)
    with rc_context(STYLE):
        svg = path.suffix == ".svg"
        DRAWINGS[name]().savefig(path, transparent=svg, metadata={"Date": None} if svg else None)


if __name__ == "__main__":
    main()
