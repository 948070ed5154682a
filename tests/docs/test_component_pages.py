"""Component pages have the same sections, a figure each, and an up-to-date table of presets."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest

ROOT = Path(__file__).parents[2]
COMPONENTS_DIR = ROOT / "docs" / "components"
PAGES = {path.stem: path for path in sorted(COMPONENTS_DIR.glob("*.md")) if path.stem != "README"}
HEADINGS = ["Configuration", "Worked example", "Papers", "Code and tests", "Models", "Common bugs", "See also"]


@pytest.fixture
def preset_tables() -> ModuleType:
    import write_preset_tables

    return write_preset_tables


def section(text: str, heading: str) -> str:
    return re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", PAGES)
def test_page_has_all_sections(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    top = text.partition("\n## ")[0]
    assert re.search(r"^\$\$\n.+\n\$\$$", top, re.MULTILINE), "the page needs an equation"
    assert f"](img/{name}.svg)" in top
    assert "```python\n" in section(text, "Configuration")
    assert re.search(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|proceedings\.mlr|transformer-c)", section(text, "Papers"))
    assert "](../../src/cutaway/" in section(text, "Code and tests")
    assert "](../checks/" in section(text, "Common bugs")


@pytest.mark.parametrize("name", PAGES)
def test_names_in_code_and_tests_exist_in_the_linked_files(name: str) -> None:
    """Names after a link to a source file must occur in it, and so must names of tests, which may end in `…`."""
    for row in section(PAGES[name].read_text(encoding="utf-8"), "Code and tests").splitlines():
        for label, link, rest in re.findall(r"\[(.+?)\]\(([^)]+)\)([^\[|]*)", row):
            source = (COMPONENTS_DIR / link).read_text(encoding="utf-8")
            names = re.findall(r"`([\w.…]+)`", rest if "/src/" in link else label)
            missing = [each for each in names for word in each.split(".") if word.rstrip("…") not in source]
            assert not missing, f"{missing} is not in {link}"


def test_every_component_has_a_figure_and_a_line_in_the_index() -> None:
    figures = {path.stem: path for path in (COMPONENTS_DIR / "img").iterdir()}
    assert figures.keys() == PAGES.keys(), "run scripts/draw_component_figures.py"
    index = (COMPONENTS_DIR / "README.md").read_text(encoding="utf-8")
    for name, path in figures.items():
        assert f"]({name}.md)" in index
        assert path.suffix == ".svg"
        assert path.stat().st_size < 60_000
        text = path.read_text(encoding="utf-8")
        assert Tree.fromstring(text).tag.endswith("svg")
        assert 'href="http' not in text


def test_preset_tables_are_up_to_date(preset_tables: ModuleType) -> None:
    assert preset_tables.COMPONENTS.keys() <= PAGES.keys()
    for name, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert ("<!-- made: presets -->" in text) is (name in preset_tables.COMPONENTS)
        if name in preset_tables.COMPONENTS:
            assert preset_tables.fill_page(text, name) == text, f"{name}: run scripts/write_preset_tables.py"


@pytest.mark.nightly
@pytest.mark.unchecked
def test_figures_are_up_to_date(tmp_path: Path) -> None:
    """Compares text and shapes. Numbers are removed, since coordinates depend on the machine in the last digits."""
    import draw_component_figures

    unstable = re.compile(r"\b[mp][0-9a-f]{10}\b|[-\d.]+|base64,[^\"]*")
    directories = dict.fromkeys(draw_component_figures.FIGURES, COMPONENTS_DIR / "img")
    directories |= dict.fromkeys(draw_component_figures.CONCEPT_FIGURES, COMPONENTS_DIR.parent / "concepts" / "img")
    for name, committed_dir in directories.items():
        draw_component_figures.save_figure(name, tmp_path / f"{name}.svg")
        drawn, committed = (
            unstable.sub("", (directory / f"{name}.svg").read_text(encoding="utf-8"))
            for directory in (tmp_path, committed_dir)
        )
        assert drawn == committed, f"{name}: run scripts/draw_component_figures.py"
