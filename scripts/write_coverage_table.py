"""Write docs/coverage.md from docs/coverage.toml: topics with their page, test, notebook and exercise.

python scripts/write_coverage_table.py
"""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COVERAGE_TOML, COVERAGE_PAGE = ROOT / "docs" / "coverage.toml", ROOT / "docs" / "coverage.md"
PAGE_HEADER = """# Coverage

<!-- written by scripts/write_coverage_table.py from coverage.toml -->

{count} items. Each has a documentation page and a test; many are measured in a notebook, some have an exercise
(`cutaway learn start N`).
"""


def load_sections() -> list[dict[str, Any]]:
    sections: list[dict[str, Any]] = tomllib.loads(COVERAGE_TOML.read_text(encoding="utf-8"))["section"]
    return sections


def load_rows() -> list[dict[str, Any]]:
    return [row for section in load_sections() for row in section["rows"]]


def find_notebook(number: int) -> Path:
    return next((ROOT / "notebooks").glob(f"{number:02}_*.py"))


def find_exercise(number: int) -> Path:
    return next((ROOT / "src" / "cutaway" / "learn" / "exercises").glob(f"e{number:02}_*.py"))


def render_page() -> str:
    lines = [PAGE_HEADER.format(count=len(load_rows()))]
    for section in load_sections():
        lines += [
            f"## {section['title']}\n",
            "| item | page | test | notebook | exercise |",
            "|---|---|---|---|---|",
        ]
        lines += [render_row(row) for row in section["rows"]]
        lines.append("")
    return "\n".join(lines)


def render_row(row: dict[str, Any]) -> str:
    page = row["page"].partition("#")[0]
    title = (ROOT / "docs" / page).read_text(encoding="utf-8").lstrip().partition("\n")[0].removeprefix("# ")
    file, test = row["test"].split("::")
    links = [f"[{title}]({row['page']})", f"[{test.removeprefix('test_').replace('_', ' ')}](../tests/{file})"]
    links += [render_link(row.get("notebook"), find_notebook), render_link(row.get("exercise"), find_exercise)]
    return " | ".join([f"| {row['item']}", *links]) + " |"


def render_link(number: int | None, find_file: Any) -> str:
    return "" if number is None else f"[{number}](../{find_file(number).relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    COVERAGE_PAGE.write_text(render_page(), encoding="utf-8")
