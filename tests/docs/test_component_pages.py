"""A page for each component: built alike, with a picture of its own and the models that have it."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "components"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"}
HEADINGS = ["Configuration", "Worked example", "Papers", "Code and tests", "Models", "Common bugs", "See also"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import write_preset_tables

    return write_preset_tables


def section(text: str, heading: str) -> str:
    return re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_sections(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    top = text.partition("\n## ")[0]
    assert re.search(r"^\$\$\n.+\n\$\$$", top, re.MULTILINE), "an equation"
    assert f"](img/{name}.svg)" in top
    assert "```python\n" in section(text, "Configuration")
    assert re.search(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|proceedings\.mlr|transformer-c)", section(text, "Papers"))
    assert "](../../src/cutaway/" in section(text, "Code and tests")
    assert "](../checks/" in section(text, "Common bugs")


@pytest.mark.parametrize("name", PAGES)
def test_names_that_a_page_tells_are_in_its_files(name: str) -> None:
    """`Rope.frequencies` beside a file is a name in it; so is a test's, but for its cut end."""
    for row in section(PAGES[name].read_text(encoding="utf-8"), "Code and tests").splitlines():
        for label, link, rest in re.findall(r"\[(.+?)\]\(([^)]+)\)([^\[|]*)", row):
            source = (FOLDER / link).read_text(encoding="utf-8")
            told = re.findall(r"`([\w.…]+)`", rest if "/src/" in link else label)
            missing = [each for each in told for word in each.split(".") if word.rstrip("…") not in source]
            assert not missing, f"{missing} is not in {link}"


def test_every_component_has_a_picture_of_its_own_and_a_line_in_the_index() -> None:
    pictures = {path.stem: path for path in (FOLDER / "img").iterdir()}
    assert pictures.keys() == PAGES.keys(), "run scripts/draw_component_figures.py"
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, path in pictures.items():
        assert f"]({name}.md)" in index
        assert path.suffix == ".svg"
        assert path.stat().st_size < 60_000
        text = path.read_text(encoding="utf-8")
        assert Tree.fromstring(text).tag.endswith("svg")
        assert 'href="http' not in text


def test_the_models_that_have_a_component_are_the_presets_that_do(program: ModuleType) -> None:
    assert program.COMPONENTS.keys() <= PAGES.keys()
    for name, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert ("<!-- made: presets -->" in text) is (name in program.COMPONENTS)
        if name in program.COMPONENTS:
            assert program.fill_page(text, name) == text, f"{name}: run scripts/write_preset_tables.py"


@pytest.mark.nightly
@pytest.mark.unchecked
def test_the_pictures_are_what_their_program_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and shapes; the last digits of a coordinate are the machine's."""
    import draw_component_figures

    for name in draw_component_figures.FIGURES:
        draw_component_figures.save_figure(name, tmp_path / f"{name}.svg")
        drawn, kept = (
            re.sub(
                r"\b[mp][0-9a-f]{10}\b|[-\d.]+|base64,[^\"]*", "", (folder / f"{name}.svg").read_text(encoding="utf-8")
            )
            for folder in (tmp_path, FOLDER / "img")
        )
        assert drawn == kept, f"{name}: run scripts/draw_component_figures.py"
