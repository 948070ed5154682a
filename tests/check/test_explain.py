"""Documentation pages of the checks: text generated from the check, image of the report on a seeded bug."""

import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest
from support.seeded_bugs.all_bugs import BUG_MODULES  # noqa: F401  registers every bug
from support.seeded_bugs.reference_gpt import ReferenceGPT
from support.seeded_bugs.registry import SEEDED_BUGS

from cutaway.check import get_checks
from cutaway.check.report.explain import explain_check, load_known_bugs

pytestmark = [pytest.mark.unchecked, pytest.mark.usefixtures("frozen_check_clock")]

ROOT = Path(__file__).parents[2]
DOCS_DIR = ROOT / "docs" / "checks"
HINT = "run scripts/write_check_docs.py"


@pytest.fixture
def script() -> ModuleType:
    import write_check_docs

    return write_check_docs


def test_pages_are_up_to_date(script: ModuleType) -> None:
    pages = script.render_pages()
    assert pages.keys() | set(script.GUIDES) == {path.name for path in DOCS_DIR.glob("*.md")}, HINT
    for name, text in pages.items():
        assert (DOCS_DIR / name).read_text(encoding="utf-8") == text, f"{name}: {HINT}"


def test_every_check_has_a_self_contained_image() -> None:
    assert {path.stem for path in (DOCS_DIR / "img").iterdir()} == get_checks().keys(), HINT
    for path in (DOCS_DIR / "img").iterdir():
        text = path.read_text(encoding="utf-8")
        content = "".join(Tree.fromstring(text).itertext()).replace("\xa0", " ")
        assert path.stem in content
        assert "docs" in content
        assert "url(http" not in text
        assert path.stat().st_size < 60_000


def read_words(svg: str) -> list[str]:
    """The words of an image with its numbers replaced: digits, widths and line breaks differ between machines."""
    texts = [element.text or "" for element in Tree.fromstring(svg).iter() if element.tag.endswith("}text")]
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", " ".join(texts)).split()


def test_images_are_reproducible(script: ModuleType) -> None:
    bug = next(bug for bug in SEEDED_BUGS.values() if bug.caught_by == "causality")
    images = [script.render_report_svg(bug) for _ in range(2)]
    assert images[0] == images[1]
    stored = (DOCS_DIR / "img" / "causality.svg").read_text(encoding="utf-8")
    assert read_words(images[0]) == read_words(stored), HINT


def test_every_check_has_a_known_bug() -> None:
    for name in get_checks():
        bug = load_known_bugs()[name]
        assert bug["url"].startswith("http")
        assert bug["summary"].endswith((".", "”"))
        assert bug["title"] in explain_check(name)


def test_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ModuleType("mine")
    mine.GPT = ReferenceGPT  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS_DIR / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    assert "0 failed" in capsys.readouterr().out
    model, overrides = names["make"]()  # type: ignore[operator]
    assert isinstance(model, ReferenceGPT)
    assert overrides.keys() == {"logits", "loss"}
