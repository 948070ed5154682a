"""Write docs/checks: a page and a figure for each check, and the index with the fields of `CheckedModel`.

python scripts/write_check_docs.py [NAME ...] [--out docs/checks]

With names, only the figures of those checks are drawn. A figure shows the report on a seeded bug of
tests/support/seeded_bugs. The output is deterministic.
"""

import argparse
import re
import sys
from collections.abc import Iterator
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
GUIDES = ("README.md", "five-minutes.md")
"""Pages that are not about one check."""
INDEX_PAGE = ROOT / "docs" / "checks" / "README.md"
GENERATED_SECTION = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
"""Generated sections of the index."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="checks whose figures are drawn; default all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "checks", help="output directory")
    args = parser.parse_args()
    torch.set_num_threads(1)  # deterministic order of summation
    (args.out / "img").mkdir(parents=True, exist_ok=True)
    for path, text in render_pages().items():
        (args.out / path).write_text(text, encoding="utf-8")
    assert BUGS
    bugs = {bug.caught_by: bug for bug in reversed(SEEDED_BUGS.values())}  # the first bug of each check
    for name in args.names or get_checks():
        if name in bugs:
            (args.out / "img" / f"{name}.svg").write_text(render_report_svg(bugs[name]), encoding="utf-8")
    remove_stale_files(args.out)
    missing = [name for name in get_checks() if name not in bugs]
    if missing:
        sys.exit(f"no figure for {', '.join(missing)}: tests/support/seeded_bugs has no bug for these checks")


def render_pages() -> dict[str, str]:
    """Return {file name: text} of all pages."""
    pages = {f"{name}.md": explain_check(name, image=f"img/{name}.svg") for name in get_checks()}
    return pages | {"README.md": render_index()}


def remove_stale_files(out: Path) -> None:
    """Delete the pages and figures of checks that no longer exist."""
    for path in [*out.glob("*.md"), *out.glob("img/*.svg")]:
        if path.stem not in get_checks() and path.name not in GUIDES:
            path.unlink()


def render_report_svg(bug: SeededBug) -> str:
    """Run the check that catches a seeded bug, and return its terminal report as SVG."""
    report = check_bug(bug, only=[bug.caught_by])
    report.findings = [report[bug.caught_by]]
    source = f"reference_gpt:{bug.name.partition('/')[2].replace(' ', '_')}"
    out = Console(record=True, width=100, file=StringIO(), highlight=False)
    render_report(report, source, show_times=False, out=out)
    svg = out.export_svg(title=f"cutaway check {source} --only {bug.caught_by}", unique_id="report")
    return "\n".join(line.rstrip() for line in FONT_FACE_PATTERN.sub("", svg).splitlines()) + "\n"


def render_index() -> str:
    sections = {
        "checks": "\n".join(render_check_groups()),
        "functions": render_field_table(FUNCTION_FIELDS),
        "properties": render_field_table(PROPERTY_FIELDS),
    }
    return GENERATED_SECTION.sub(
        lambda match: f"{match[1]}{sections[match[2]].rstrip()}\n{match[3]}", INDEX_PAGE.read_text(encoding="utf-8")
    )


def render_check_groups() -> Iterator[str]:
    """Yield the lines of the Markdown tables of all checks, one table per module."""
    for group in CHECK_MODULES:
        module = f"cutaway.check.checks.{group}"
        checks = [check for check in get_checks().values() if check.run.__module__ == module]
        yield f"### {checks[0].subject}\n\n| check | catches |\n|---|---|"
        for check in checks:
            yield f"| [{check.name}]({check.name}.md) | {escape_cell(check.catches)} |"
        yield ""


def render_field_table(names: list[str]) -> str:
    """Return a Markdown table of these fields of `CheckedModel` with their docstrings."""
    docs = read_field_docstrings(CheckedModel)
    rows = [f"| `{name}` | {escape_cell(docs.get(name) or FIELD_DESCRIPTIONS[name])} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


FIELD_DESCRIPTIONS = {
    "module": "The nn.Module, for checks of parameters, buffers, training mode and hooks.",
    "vocab_size": "Vocabulary size.",
    "num_layers": "Number of layers.",
    "pad_token_id": "Id of the padding token.",
    "eos_token_id": "Id of the end-of-sequence token.",
    "device": "Device of the weights.",
    "dtype": "Dtype of the weights.",
    "trained": "Whether the weights are trained, not random.",
}
"""Descriptions of fields without a docstring."""


def escape_cell(text: str) -> str:
    """Convert text to one line with escaped bars, for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
