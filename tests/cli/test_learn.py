"""`cutaway learn` as a person and as a machine use it, and what is remembered."""

import json
from pathlib import Path

import pytest
from support.cli_runner import CliRunner

from cutaway.learn import progress_store
from cutaway.learn.exercises import get_exercise

pytestmark = pytest.mark.unchecked


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_the_list_to_passed(run_cli: CliRunner, home: Path) -> None:
    assert "Splitting heads" in run_cli("learn", "list")
    rows = json.loads(run_cli("learn", "list", "--json"))
    assert [row["number"] for row in rows] == list(range(1, 11))
    assert {row["status"] for row in rows} == {"not started"}
    assert "learn/04-attention-params.py" in run_cli("learn", "start", 4)
    path = home / "learn" / "04-attention-params.py"
    assert path.read_text() == get_exercise(4).stub
    assert "not written yet" in run_cli("learn", "check", 4, code=1)
    path.write_text(get_exercise(4).solution.replace("if bias else 0", "if False else 0"))
    shown = run_cli("learn", "check", 4, code=1)
    assert "likely mistake: biases forgotten" in shown
    assert "2,362,368 is right" in shown
    assert run_cli("learn", "hint", 4).startswith("hint 1 of 3")
    assert "hint 2 of 3" in run_cli("learn", "hint", 4)
    told = json.loads(run_cli("learn", "hint", 4, "--json"))
    assert (len(told["hints"]), told["remaining"]) == (3, 0)
    assert "These are all" in run_cli("learn", "hint", 4)
    assert run_cli("learn", "solution", 4) == get_exercise(4).solution
    path.write_text(get_exercise(4).solution)
    assert "passed" in run_cli("learn", "check", 4)
    told = json.loads(run_cli("learn", "check", 4, path, "--json"))
    assert told["passed"]
    assert told["record"]["attempts"] == 3
    told = json.loads(run_cli("learn", "progress", "--json"))
    assert told["passed"] == 1
    row = told["exercises"][3]
    assert (row["status"], row["attempts"], row["num_hints"], row["solution_shown"]) == ("passed", 3, 3, True)
    elsewhere = home / "mine.py"
    elsewhere.write_text(get_exercise(4).solution)
    assert "mine.py" in run_cli("learn", "check", 4, elsewhere)
    path.write_text(get_exercise(4).stub)
    run_cli("learn", "check", 4, code=1)  # of the file in this folder, not of the one that was checked last
    assert "passed" in run_cli("learn", "progress")  # what was passed stays so
    assert "1 of 10 passed; next: `cutaway learn start 1`" in run_cli("learn", "progress")


def test_nothing_of_the_learners_is_overwritten(run_cli: CliRunner, home: Path) -> None:
    run_cli("learn", "start", 3)
    path = home / "learn" / "03-heads.py"
    path.write_text("mine")
    assert "is there already, and may hold your work" in run_cli("learn", "start", 3, code=2)
    assert "03-heads.old.py" in run_cli("learn", "start", 3, "--restart")
    assert (home / "learn" / "03-heads.old.py").read_text() == "mine"
    path.write_text("mine too")
    told = json.loads(run_cli("learn", "start", 3, "--restart", "--json"))
    assert Path(told["previous_file"]).read_text() == "mine too"
    told = json.loads(run_cli("learn", "start", 3, "--ipynb", "--dir", "books", "--json"))
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
def test_mistakes_get_one_sentence(run_cli: CliRunner, home: Path, arguments: list[object], message: str) -> None:
    (home / "notes.txt").write_text("")
    (home / "broken.ipynb").write_text('{"cells": [3]}')
    (home / "latin.py").write_bytes(b"# caf\xe9")
    assert message in run_cli("learn", *arguments, code=2)


def test_a_damaged_record_is_set_aside_and_a_kept_one_survives(
    run_cli: CliRunner, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home / "state" / "exercises.json"
    place.parent.mkdir()
    for text in ("{", '{"3": {"attempts": "many"}}', "[1]", '{"3": {"colour": 1}}', '{"three": {}}'):
        place.write_text(text)
        assert "0 of 10 passed" in run_cli("learn", "progress")
        assert not place.exists()
    aside = list(place.parent.glob("exercises.damaged-*.json"))
    assert aside
    run_cli("learn", "hint", 3)
    assert json.loads(place.read_text())["3"]["num_hints"] == 1
    assert not list(place.parent.glob("*.tmp"))


def test_where_nothing_can_be_kept_the_rest_still_works(
    run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "flat").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "flat" / "state"))
    (home / "mine.py").write_text(get_exercise(8).solution)
    assert "passed" in run_cli("learn", "check", 8, "mine.py")
    assert "hint 1 of 3" in run_cli("learn", "hint", 8)
    assert "04-attention-params.py" in run_cli("learn", "start", 4)
    with pytest.raises(progress_store.ProgressStoreError, match="set CUTAWAY_HOME to a folder of yours"):
        progress_store.write_progress("exercises", {})
    monkeypatch.delenv("CUTAWAY_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert progress_store.state_directory() == home / "xdg" / "cutaway"
