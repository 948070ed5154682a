"""Each check has its page, made from the check itself; its picture is the report on a real bug."""

import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest
from support.seeded_bugs.all_bugs import BUG_MODULES  # noqa: F401  enters every bug
from support.seeded_bugs.reference_gpt import ReferenceGPT
from support.seeded_bugs.registry import SEEDED_BUGS

from cutaway.check import get_checks
from cutaway.check.report.explain import explain_check, load_known_bugs

pytestmark = pytest.mark.unchecked

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "checks"
AGAIN = "run scripts/write_check_docs.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import write_check_docs

    return write_check_docs


def test_the_pages_are_those_of_the_checks(program: ModuleType) -> None:
    made = program.render_pages()
    assert made.keys() == {path.name for path in FOLDER.glob("*.md")}, AGAIN
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: {AGAIN}"


def test_every_check_has_a_picture_without_anything_from_elsewhere() -> None:
    assert {path.stem for path in (FOLDER / "img").iterdir()} == get_checks().keys(), AGAIN
    for path in (FOLDER / "img").iterdir():
        text = path.read_text(encoding="utf-8")
        said = "".join(Tree.fromstring(text).itertext()).replace("\xa0", " ")
        assert path.stem in said
        assert "docs" in said
        assert "url(http" not in text
        assert path.stat().st_size < 60_000


def read_words(svg: str) -> list[str]:
    """The words of a picture, without its numbers: their digits, and so widths and line breaks, differ by machine."""
    texts = [part.text or "" for part in Tree.fromstring(svg).iter() if part.tag.endswith("}text")]
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", " ".join(texts)).split()


def test_a_picture_is_drawn_again_the_same(program: ModuleType) -> None:
    bug = next(each for each in SEEDED_BUGS.values() if each.caught_by == "causality")
    made = [program.render_report_svg(bug) for _ in range(2)]
    assert made[0] == made[1]
    stored = (FOLDER / "img" / "causality.svg").read_text(encoding="utf-8")
    assert read_words(made[0]) == read_words(stored), AGAIN


def test_every_check_has_a_public_case() -> None:
    for name in get_checks():
        case = load_known_bugs()[name]
        assert case["url"].startswith("http")
        assert case["summary"].endswith((".", "”"))
        assert case["title"] in explain_check(name)


def test_the_example_of_the_index_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ModuleType("mine")
    mine.GPT = ReferenceGPT  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    assert "0 failed" in capsys.readouterr().out
    model, overrides = names["make"]()  # type: ignore[operator]
    assert isinstance(model, ReferenceGPT)
    assert overrides.keys() == {"logits", "loss"}
