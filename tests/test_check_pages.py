"""Each check has its page, made from the check itself; its picture is the report on a real bug."""

import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as Tree

import pytest
from zoo.bug import ZOO
from zoo.home import Home
from zoo.rooms import ROOMS  # noqa: F401  enters every bug

from cutaway.check import checks
from cutaway.check.page import cases, page

pytestmark = pytest.mark.unchecked

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "checks"
AGAIN = "run scripts/check_pages.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import check_pages

    return check_pages


def test_the_pages_are_those_of_the_checks(program: ModuleType) -> None:
    made = program.pages()
    assert made.keys() == {path.name for path in FOLDER.glob("*.md")}, AGAIN
    for name, text in made.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: {AGAIN}"


def test_every_check_has_a_picture_without_anything_from_elsewhere() -> None:
    assert {path.stem for path in (FOLDER / "img").iterdir()} == checks().keys(), AGAIN
    for path in (FOLDER / "img").iterdir():
        text = path.read_text(encoding="utf-8")
        said = "".join(Tree.fromstring(text).itertext()).replace("\xa0", " ")
        assert path.stem in said
        assert "explained in" in said
        assert "url(http" not in text
        assert path.stat().st_size < 60_000


def test_a_picture_is_drawn_again_the_same(program: ModuleType) -> None:
    bug = next(each for each in ZOO.values() if each.caught == "causality")
    made = [program.picture(bug) for _ in range(2)]
    assert made[0] == made[1]
    words, kept = (re.sub(r"[\d.e-]+", "", text) for text in (made[0], (FOLDER / "img" / "causality.svg").read_text()))
    assert words == kept, AGAIN


def test_every_check_has_a_public_case() -> None:
    for name in checks():
        case = cases()[name]
        assert case["url"].startswith("http")
        assert case["facts"].endswith((".", "”"))
        assert case["title"] in page(name)


def test_the_example_of_the_index_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ModuleType("mine")
    mine.GPT = Home  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", mine)
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(code, names)
    assert "0 failed" in capsys.readouterr().out
    model, offers = names["make"]()  # type: ignore[operator]
    assert isinstance(model, Home)
    assert offers.keys() == {"logits", "loss"}
