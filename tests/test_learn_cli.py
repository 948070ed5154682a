"""`cutaway learn` as a person and as a machine use it, and what is remembered."""

import json
from pathlib import Path

import pytest
from verbs import Run

from cutaway.learn import kept
from cutaway.learn.exercises import exercise

pytestmark = pytest.mark.unchecked


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_the_list_to_passed(verb: Run, home: Path) -> None:
    assert "Splitting heads" in verb("learn", "list")
    rows = json.loads(verb("learn", "list", "--json"))
    assert [row["number"] for row in rows] == list(range(1, 11))
    assert {row["state"] for row in rows} == {"not begun"}
    assert "learn/04-count-attention.py" in verb("learn", "start", 4)
    path = home / "learn" / "04-count-attention.py"
    assert path.read_text() == exercise(4).stub
    assert "not written yet" in verb("learn", "check", 4, code=1)
    path.write_text(exercise(4).solution.replace("if bias else 0", "if False else 0"))
    shown = verb("learn", "check", 4, code=1)
    assert "likely mistake: biases forgotten" in shown
    assert "2,362,368 is right" in shown
    assert verb("learn", "hint", 4).startswith("hint 1 of 3")
    assert "hint 2 of 3" in verb("learn", "hint", 4)
    told = json.loads(verb("learn", "hint", 4, "--json"))
    assert (len(told["hints"]), told["left"]) == (3, 0)
    assert "These are all" in verb("learn", "hint", 4)
    assert verb("learn", "solution", 4) == exercise(4).solution
    path.write_text(exercise(4).solution)
    assert "passed" in verb("learn", "check", 4)
    told = json.loads(verb("learn", "check", 4, path, "--json"))
    assert told["passed"]
    assert told["record"]["tries"] == 3
    told = json.loads(verb("learn", "progress", "--json"))
    assert told["passed"] == 1
    row = told["exercises"][3]
    assert (row["state"], row["tries"], row["hints"], row["shown"]) == ("passed", 3, 3, True)
    elsewhere = home / "mine.py"
    elsewhere.write_text(exercise(4).solution)
    assert "mine.py" in verb("learn", "check", 4, elsewhere)
    path.write_text(exercise(4).stub)
    verb("learn", "check", 4, code=1)  # of the file in this folder, not of the one that was checked last
    assert "passed" in verb("learn", "progress")  # what was passed stays so
    assert "1 of 10 passed; next: `cutaway learn start 1`" in verb("learn", "progress")


def test_nothing_of_the_learners_is_overwritten(verb: Run, home: Path) -> None:
    verb("learn", "start", 3)
    path = home / "learn" / "03-heads.py"
    path.write_text("mine")
    assert "is there already, and may hold your work" in verb("learn", "start", 3, code=2)
    assert "03-heads.old.py" in verb("learn", "start", 3, "--again")
    assert (home / "learn" / "03-heads.old.py").read_text() == "mine"
    path.write_text("mine too")
    told = json.loads(verb("learn", "start", 3, "--again", "--json"))
    assert Path(told["kept"]).read_text() == "mine too"
    told = json.loads(verb("learn", "start", 3, "--ipynb", "--dir", "books", "--json"))
    assert json.loads(Path(told["file"]).read_text())["nbformat"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start", 11], "there is no exercise 11; they are numbered 1 to 10"),
        (["check", 3], "there is no file to check for exercise 3; `cutaway learn start 3` writes one"),
        (["check", 3, "nope.py"], "there is no file 'nope.py'"),
        (["check", 3, "."], "is a directory"),
        (["check", 3, "notes.txt"], "neither a .py nor an .ipynb"),
        (["check", 3, "broken.ipynb"], "is no notebook that can be read"),
        (["check", 3, "latin.py"], "is no text in UTF-8"),
        (["solution", 3], "has not been tried yet"),
        (["start", 3, "--dir", "notes.txt"], "which is a file"),
    ],
)
def test_mistakes_get_one_sentence(verb: Run, home: Path, arguments: list[object], message: str) -> None:
    (home / "notes.txt").write_text("")
    (home / "broken.ipynb").write_text('{"cells": [3]}')
    (home / "latin.py").write_bytes(b"# caf\xe9")
    assert message in verb("learn", *arguments, code=2)


def test_a_damaged_record_is_set_aside_and_a_kept_one_survives(
    verb: Run, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home / "state" / "exercises.json"
    place.parent.mkdir()
    for text in ("{", '{"3": {"tries": "many"}}', "[1]", '{"3": {"colour": 1}}', '{"three": {}}'):
        place.write_text(text)
        assert "0 of 10 passed" in verb("learn", "progress")
        assert not place.exists()
    aside = list(place.parent.glob("exercises.damaged-*.json"))
    assert aside
    verb("learn", "hint", 3)
    assert json.loads(place.read_text())["3"]["hints"] == 1
    assert not list(place.parent.glob("*.tmp"))


def test_where_nothing_can_be_kept_the_rest_still_works(verb: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "flat").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "flat" / "state"))
    (home / "mine.py").write_text(exercise(8).solution)
    assert "passed" in verb("learn", "check", 8, "mine.py")
    assert "hint 1 of 3" in verb("learn", "hint", 8)
    assert "04-count-attention.py" in verb("learn", "start", 4)
    with pytest.raises(kept.KeptError, match="set CUTAWAY_HOME to a folder of yours"):
        kept.write("exercises", {})
    monkeypatch.delenv("CUTAWAY_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert kept.folder() == home / "xdg" / "cutaway"
