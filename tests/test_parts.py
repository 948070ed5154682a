"""A page for each part: built alike, with a picture of its own and the models that have it."""

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "parts"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md")) if path.stem != "README"}
HEADINGS = ["In a configuration", "A number", "Papers", "Where it stands", "Who uses it", "What goes wrong", "More"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import part_presets

    return part_presets


def section(text: str, heading: str) -> str:
    return re.split(r"^## ", text.partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_sections(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    top = text.partition("\n## ")[0]
    assert re.search(r"^\$\$\n.+\n\$\$$", top, re.MULTILINE), "an equation"
    assert f"](img/{name}.svg)" in top
    assert "```python\n" in section(text, "In a configuration")
    assert re.search(r"https://(arxiv\.org/abs/\d{4}\.\d{5}|proceedings\.mlr|transformer-c)", section(text, "Papers"))
    assert "](../../src/cutaway/" in section(text, "Where it stands")
    assert "](../checks/" in section(text, "What goes wrong")


@pytest.mark.parametrize("name", PAGES)
def test_names_that_a_page_tells_are_in_its_files(name: str) -> None:
    """`Rope.frequencies` beside a file is a name in it; so is a test's, but for its cut end."""
    for row in section(PAGES[name].read_text(encoding="utf-8"), "Where it stands").splitlines():
        for label, link, rest in re.findall(r"\[(.+?)\]\(([^)]+)\)([^\[|]*)", row):
            source = (FOLDER / link).read_text(encoding="utf-8")
            told = re.findall(r"`([\w.…]+)`", rest if "/src/" in link else label)
            missing = [each for each in told for word in each.split(".") if word.rstrip("…") not in source]
            assert not missing, f"{missing} is not in {link}"


def test_every_part_has_a_picture_of_its_own_and_a_line_in_the_index() -> None:
    pictures = {path.stem: path for path in (FOLDER / "img").iterdir()}
    assert pictures.keys() == PAGES.keys(), "run scripts/part_pictures.py"
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, path in pictures.items():
        assert f"]({name}.md)" in index
        assert path.suffix == ".svg"
        assert path.stat().st_size < 60_000
        text = path.read_text(encoding="utf-8")
        assert Tree.fromstring(text).tag.endswith("svg")
        assert 'href="http' not in text


def test_the_models_that_have_a_part_are_the_presets_that_do(program: ModuleType) -> None:
    assert program.USES.keys() <= PAGES.keys()
    for name, path in PAGES.items():
        text = path.read_text(encoding="utf-8")
        assert ("<!-- made: presets -->" in text) is (name in program.USES)
        if name in program.USES:
            assert program.written(text, name) == text, f"{name}: run scripts/part_presets.py"


@pytest.mark.nightly
@pytest.mark.unchecked
def test_the_pictures_are_what_their_program_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and shapes; the last digits of a coordinate are the machine's."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import part_pictures

    for name in part_pictures.DRAWINGS:
        part_pictures.draw(name, tmp_path / f"{name}.svg")
        drawn, kept = (
            re.sub(r"[-\d.]+|base64,[^\"]*", "", (folder / f"{name}.svg").read_text(encoding="utf-8"))
            for folder in (tmp_path, FOLDER / "img")
        )
        assert drawn == kept, f"{name}: run scripts/part_pictures.py"
