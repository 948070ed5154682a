"""Makes docs/checks: a page for each check and its picture, and the index with all that a model can offer.

python scripts/write_check_docs.py [NAME ...] [--out docs/checks]

With names, only those pictures are made anew. A picture is the real report on a seeded bug of
tests/support/seeded_bugs, so the same comes out every time.
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

from support.seeded_bugs.all_bugs import BUG_MODULES as BUGS  # noqa: E402
from support.seeded_bugs.registry import SEEDED_BUGS, SeededBug, check_bug  # noqa: E402

from cutaway.check import CheckedModel, get_checks  # noqa: E402
from cutaway.check.checked_model import FUNCTION_FIELDS, PROPERTY_FIELDS  # noqa: E402
from cutaway.check.registry import CHECK_MODULES  # noqa: E402
from cutaway.check.report.explain import explain_check  # noqa: E402
from cutaway.cli.views.check_report import render_report  # noqa: E402
from cutaway.config.field_docstrings import read_field_docstrings  # noqa: E402

FONT_FACE_PATTERN = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
INDEX_PAGE = ROOT / "docs" / "checks" / "README.md"
GENERATED_SECTION = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Places of the index that are filled here; the rest is written by hand."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", help="checks whose pictures are made anew; all unless given")
    asked.add_argument("--out", type=Path, default=ROOT / "docs" / "checks", help="where pages and pictures go")
    options = asked.parse_args()
    torch.set_num_threads(1)  # sums are then in one order
    (options.out / "img").mkdir(parents=True, exist_ok=True)
    for path, text in render_pages().items():
        (options.out / path).write_text(text, encoding="utf-8")
    assert BUGS
    bugs = {each.caught_by: each for each in reversed(SEEDED_BUGS.values())}  # of several, the first
    for name in options.names or get_checks():
        if name in bugs:
            (options.out / "img" / f"{name}.svg").write_text(render_report_svg(bugs[name]), encoding="utf-8")
    remove_stale_files(options.out)
    without = [name for name in get_checks() if name not in bugs]
    if without:
        sys.exit(f"no picture for {', '.join(without)}: tests/support/seeded_bugs has no bug that they catch")


def render_pages() -> dict[str, str]:
    """The text of every page by its file's name."""
    told = {f"{name}.md": explain_check(name, image=f"img/{name}.svg") for name in get_checks()}
    return told | {"README.md": render_index()}


def remove_stale_files(out: Path) -> None:
    """Pages and pictures of checks that are no more."""
    for path in [*out.glob("*.md"), *out.glob("img/*.svg")]:
        if path.stem not in get_checks() and path.name != "README.md":
            path.unlink()


def render_report_svg(bug: SeededBug) -> str:
    """What its check says of a bug, as the terminal shows it."""
    report = check_bug(bug, only=[bug.caught_by])
    report.findings = [report[bug.caught_by]]
    source = f"reference_gpt:{bug.name.partition('/')[2].replace(' ', '_')}"
    out = Console(record=True, width=100, file=StringIO(), highlight=False)
    render_report(report, source, show_times=False, out=out)
    svg = out.export_svg(title=f"cutaway check {source} --only {bug.caught_by}", unique_id="report")
    return "\n".join(line.rstrip() for line in FONT_FACE_PATTERN.sub("", svg).splitlines()) + "\n"


def render_index() -> str:
    parts = {
        "checks": "\n".join(render_check_groups()),
        "functions": render_field_table(FUNCTION_FIELDS),
        "properties": render_field_table(PROPERTY_FIELDS),
    }
    return GENERATED_SECTION.sub(
        lambda place: f"{place[1]}{parts[place[2]].rstrip()}\n{place[3]}", INDEX_PAGE.read_text(encoding="utf-8")
    )


def render_check_groups() -> Iterator[str]:
    """All checks, by the part of a Transformer that they ask about."""
    for group in CHECK_MODULES:
        module = f"cutaway.check.checks.{group}"
        about = cleandoc(import_module(module).__doc__ or "").splitlines()[0]
        yield f"### {group.replace('_', ' ').capitalize()}\n\n{about}\n\n| check | catches |\n|---|---|"
        for each in get_checks().values():
            if each.run.__module__ == module:
                yield f"| [{each.name}]({each.name}.md) | {escape_cell(each.catches)} |"
        yield ""


def render_field_table(names: list[str]) -> str:
    """Fields of a CheckedModel, with what stands under each."""
    notes = read_field_docstrings(CheckedModel)
    rows = [f"| `{name}` | {escape_cell(notes.get(name) or FIELD_DESCRIPTIONS[name])} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


FIELD_DESCRIPTIONS = {
    "module": "The nn.Module itself: its parameters, buffers, modes and hooks.",
    "vocab_size": "How many tokens it knows.",
    "num_layers": "How many there are.",
    "pad_token_id": "The token of padding.",
    "eos_token_id": "The token that ends a text.",
    "device": "Where its tensors are.",
    "dtype": "That of its weights.",
    "trained": "Whether its weights are trained, or random.",
}
"""Of fields that need no words in the code."""


def escape_cell(text: str) -> str:
    """Within a table, one line without bars."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
