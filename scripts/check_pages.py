"""Makes docs/checks: a page for each check and its picture, and the index with all that a target can offer.

python scripts/check_pages.py [NAME ...] [--out docs/checks]

With names, only those pictures are made anew. A picture is the real report on a seeded bug of tests/zoo, so the same
comes out every time.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from zoo.bug import ZOO, Bug, examined  # noqa: E402
from zoo.rooms import ROOMS as BUGS  # noqa: E402

from cutaway.check import Target, checks  # noqa: E402
from cutaway.check.page import page  # noqa: E402
from cutaway.check.registry import ROOMS  # noqa: E402
from cutaway.check.target import FACTS, OFFERS  # noqa: E402
from cutaway.cli.check_view import show  # noqa: E402
from cutaway.config.field_notes import field_notes  # noqa: E402

FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
INDEX = ROOT / "docs" / "checks" / "README.md"
MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Places of the index that are filled here; the rest is written by hand."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", help="checks whose pictures are made anew; all unless given")
    asked.add_argument("--out", type=Path, default=ROOT / "docs" / "checks", help="where pages and pictures go")
    options = asked.parse_args()
    torch.set_num_threads(1)  # sums are then in one order
    (options.out / "img").mkdir(parents=True, exist_ok=True)
    for path, text in pages().items():
        (options.out / path).write_text(text, encoding="utf-8")
    assert BUGS
    bugs = {each.caught: each for each in reversed(ZOO.values())}  # of several, the first
    for name in options.names or checks():
        if name in bugs:
            (options.out / "img" / f"{name}.svg").write_text(picture(bugs[name]), encoding="utf-8")
    clear(options.out)
    without = [name for name in checks() if name not in bugs]
    if without:
        sys.exit(f"no picture for {', '.join(without)}: tests/zoo has no bug that they catch")


def pages() -> dict[str, str]:
    """The text of every page by its file's name."""
    told = {f"{name}.md": page(name, picture=f"img/{name}.svg") for name in checks()}
    return told | {"README.md": index()}


def clear(out: Path) -> None:
    """Pages and pictures of checks that are no more."""
    for path in [*out.glob("*.md"), *out.glob("img/*.svg")]:
        if path.stem not in checks() and path.name != "README.md":
            path.unlink()


def picture(bug: Bug) -> str:
    """What its check says of a bug, as the terminal shows it."""
    report = examined(bug, only=[bug.caught])
    report.findings = [report[bug.caught]]
    source = f"home:{bug.name.partition('/')[2].replace(' ', '_')}"
    out = Console(record=True, width=100, file=StringIO(), highlight=False)
    show(report, source, timed=False, out=out)
    svg = out.export_svg(title=f"cutaway check {source} --only {bug.caught}", unique_id="report")
    return "\n".join(line.rstrip() for line in FONTS.sub("", svg).splitlines()) + "\n"


def index() -> str:
    parts = {"checks": "\n".join(groups()), "offers": table(OFFERS), "facts": table(FACTS)}
    return MADE.sub(
        lambda place: f"{place[1]}{parts[place[2]].rstrip()}\n{place[3]}", INDEX.read_text(encoding="utf-8")
    )


def groups() -> Iterator[str]:
    """All checks, by the part of a Transformer that they ask about."""
    for room in ROOMS:
        module = f"cutaway.check.checks.{room}"
        about = cleandoc(import_module(module).__doc__ or "").splitlines()[0]
        yield f"### {room.capitalize()}\n\n{about}\n\n| check | catches |\n|---|---|"
        for each in checks().values():
            if each.run.__module__ == module:
                yield f"| [{each.name}]({each.name}.md) | {cell(each.catches)} |"
        yield ""


def table(names: list[str]) -> str:
    """Fields of a target, with what stands under each."""
    notes = field_notes(Target)
    rows = [f"| `{name}` | {cell(notes.get(name) or OBVIOUS[name])} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


OBVIOUS = {
    "module": "The nn.Module itself: its parameters, buffers, modes and hooks.",
    "vocab": "How many tokens it knows.",
    "layers": "How many there are.",
    "pad": "The token of padding.",
    "eos": "The token that ends a text.",
    "device": "Where its tensors are.",
    "dtype": "That of its weights.",
    "trained": "Whether its weights are trained, or random.",
}
"""Of fields that need no words in the code."""


def cell(text: str) -> str:
    """Within a table, one line without bars."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
