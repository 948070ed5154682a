"""Writes docs/coverage.md from docs/coverage.toml: what there is to know of a Transformer, and where each of it stands.

python scripts/coverage_table.py
"""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "docs" / "coverage.toml", ROOT / "docs" / "coverage.md"
HEAD = """# What is covered, and where

<!-- written by scripts/coverage_table.py from coverage.toml -->

{count} items. Each has a page that explains it and a test that holds it; many are measured by a notebook, some are an
exercise (`cutaway learn start N`).
"""


def sections() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["section"]
    return found


def rows() -> list[dict[str, Any]]:
    return [row for section in sections() for row in section["rows"]]


def notebook(number: int) -> Path:
    """The theory notebook of this number."""
    return next((ROOT / "notebooks").glob(f"{number:02}_*.py"))


def exercise(number: int) -> Path:
    return next((ROOT / "src" / "cutaway" / "learn" / "exercises").glob(f"e{number:02}_*.py"))


def written() -> str:
    lines = [HEAD.format(count=len(rows()))]
    for section in sections():
        lines += [
            f"## {section['title']}\n",
            "| item | page | held by | notebook | exercise |",
            "|---|---|---|---|---|",
        ]
        lines += [line(row) for row in section["rows"]]
        lines.append("")
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    page = row["page"].partition("#")[0]
    title = (ROOT / "docs" / page).read_text(encoding="utf-8").lstrip().partition("\n")[0].removeprefix("# ")
    file, test = row["test"].split("::")
    links = [f"[{title}]({row['page']})", f"[{test.removeprefix('test_').replace('_', ' ')}](../tests/{file})"]
    links += [number_link(row.get("notebook"), notebook), number_link(row.get("exercise"), exercise)]
    return " | ".join([f"| {row['item']}", *links]) + " |"


def number_link(number: int | None, where: Any) -> str:
    return "" if number is None else f"[{number}](../{where(number).relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
