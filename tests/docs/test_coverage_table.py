"""The coverage table refers to existing files and tests, and every page is reachable from the first."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
from doc_links import find_links
from write_coverage_table import COVERAGE_PAGE, find_exercise, find_notebook, load_rows, render_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def function_names(file: Path) -> set[str]:
    return {each.name for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("row", load_rows(), ids=lambda row: row["item"])
def test_row_refers_to_existing_files(row: dict[str, object]) -> None:
    page, anchor = str(row["page"]).partition("#")[::2]
    text = (DOCS / page).read_text(encoding="utf-8")
    slugs = [re.sub(r"[^\w]+", "-", head.lower()).strip("-") for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    assert not anchor or anchor in slugs
    file, test = str(row["test"]).split("::")
    assert test in function_names(ROOT / "tests" / file)
    if "notebook" in row:
        assert find_notebook(int(str(row["notebook"]))).is_file()
    if "exercise" in row:
        assert find_exercise(int(str(row["exercise"]))).is_file()


def test_table_is_up_to_date() -> None:
    assert len({row["item"] for row in load_rows()}) == len(load_rows()) > 100
    assert COVERAGE_PAGE.read_text(encoding="utf-8") == render_page(), "run scripts/write_coverage_table.py"


def test_every_page_is_reachable_from_the_first() -> None:
    """By links, without the navigation of the site."""
    found, queue = set(), [DOCS / "index.md"]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        for link in find_links(path.read_text(encoding="utf-8")):
            target = Path(os.path.normpath(path.parent / link.partition("#")[0]))
            target = target / "README.md" if target.is_dir() else target
            if not re.match(r"[a-z]+:|#", link) and target.suffix == ".md" and target.is_file():
                queue.append(target)
    assert not [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path not in found]
