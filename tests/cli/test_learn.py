"""`cutaway learn`: exercises, hints, grading, stored progress, errors."""

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support.cli_runner import CliRunner

from cutaway.learn import progress_store
from cutaway.learn.exercises import get_exercise, load_exercises
from cutaway.user_files import user_state_dir

pytestmark = pytest.mark.unchecked


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_exercise_from_start_to_passed(run_cli: CliRunner, home: Path) -> None:
    assert "Splitting heads" in run_cli("learn", "list")
    rows = json.loads(run_cli("learn", "list", "--json"))
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["status"] for row in rows} == {"not started"}
    output = run_cli("learn", "start", 4)
    assert "learn/04-attention-params.py" in output
    assert "`cutaway learn notebook 8`" in output
    path = home / "learn" / "04-attention-params.py"
    assert path.read_text() == get_exercise(4).stub
    assert "not written yet" in run_cli("learn", "check", 4, code=1)
    path.write_text(get_exercise(4).solution.replace("if bias else 0", "if False else 0"))
    output = run_cli("learn", "check", 4, code=1)
    assert "likely mistake: biases forgotten" in output
    assert "expected 2,362,368" in output
    assert run_cli("learn", "hint", 4).startswith("hint 1 of 3")
    assert "hint 2 of 3" in run_cli("learn", "hint", 4)
    data = json.loads(run_cli("learn", "hint", 4, "--json"))
    assert (len(data["hints"]), data["remaining"]) == (3, 0)
    assert "There are no more hints" in run_cli("learn", "hint", 4)
    assert run_cli("learn", "solution", 4) == get_exercise(4).solution
    path.write_text(get_exercise(4).solution)
    assert "passed" in run_cli("learn", "check", 4)
    data = json.loads(run_cli("learn", "check", 4, path, "--json"))
    assert data["passed"]
    assert data["record"]["attempts"] == 3
    data = json.loads(run_cli("learn", "progress", "--json"))
    assert data["passed"] == 1
    row = data["exercises"][3]
    assert (row["status"], row["attempts"], row["num_hints"], row["solution_shown"]) == ("passed", 3, 3, True)
    other_path = home / "mine.py"
    other_path.write_text(get_exercise(4).solution)
    assert "mine.py" in run_cli("learn", "check", 4, other_path)
    path.write_text(get_exercise(4).stub)
    run_cli("learn", "check", 4, code=1)  # checks the file in this directory, not the last one checked
    assert "passed" in run_cli("learn", "progress")  # a passed exercise stays passed
    assert f"1 of {len(rows)} passed; next: `cutaway learn start 1`" in run_cli("learn", "progress")


def test_existing_files_are_not_overwritten(run_cli: CliRunner, home: Path) -> None:
    run_cli("learn", "start", 3)
    path = home / "learn" / "03-heads.py"
    path.write_text("mine")
    assert "already exists and may contain your work" in run_cli("learn", "start", 3, code=2)
    assert "03-heads.old.py" in run_cli("learn", "start", 3, "--restart")
    assert (home / "learn" / "03-heads.old.py").read_text() == "mine"
    path.write_text("mine too")
    data = json.loads(run_cli("learn", "start", 3, "--restart", "--json"))
    assert Path(data["previous_file"]).read_text() == "mine too"
    data = json.loads(run_cli("learn", "start", 3, "--ipynb", "--dir", "books", "--json"))
    assert json.loads(Path(data["file"]).read_text())["nbformat"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start", 99], f"there is no exercise 99; exercises are numbered 1 to {len(load_exercises())}"),
        (["check", 3], "exercise 3 has no file to check; write one with `cutaway learn start 3`"),
        (["check", 3, "nope.py"], "there is no file 'nope.py'"),
        (["check", 3, "."], "is a directory"),
        (["check", 3, "notes.txt"], "neither a .py nor an .ipynb file"),
        (["check", 3, "broken.ipynb"], "is not a valid notebook"),
        (["check", 3, "latin.py"], "is not UTF-8 text"),
        (["solution", 3], "has no attempt"),
        (["start", 3, "--dir", "notes.txt"], "which is a file"),
    ],
)
def test_errors_have_one_message(run_cli: CliRunner, home: Path, arguments: list[object], message: str) -> None:
    (home / "notes.txt").write_text("")
    (home / "broken.ipynb").write_text('{"cells": [3]}')
    (home / "latin.py").write_bytes(b"# caf\xe9")
    assert message in run_cli("learn", *arguments, code=2)


def test_damaged_progress_file_is_renamed(run_cli: CliRunner, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "state" / "exercises.json"
    path.parent.mkdir()
    for text in ("{", '{"3": {"attempts": "many"}}', "[1]", '{"3": {"colour": 1}}', '{"three": {}}'):
        path.write_text(text)
        assert f"0 of {len(load_exercises())} passed" in run_cli("learn", "progress")
        assert not path.exists()
    damaged_files = list(path.parent.glob("exercises.damaged-*.json"))
    assert damaged_files
    run_cli("learn", "hint", 3)
    assert json.loads(path.read_text())["3"]["num_hints"] == 1
    assert not list(path.parent.glob("*.tmp"))


def test_read_only_state_directory_is_not_fatal(
    run_cli: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "flat").write_text("")
    monkeypatch.setenv("CUTAWAY_HOME", str(home / "flat" / "state"))
    (home / "mine.py").write_text(get_exercise(8).solution)
    assert "passed" in run_cli("learn", "check", 8, "mine.py")
    assert "hint 1 of 3" in run_cli("learn", "hint", 8)
    assert "04-attention-params.py" in run_cli("learn", "start", 4)
    with pytest.raises(progress_store.ProgressStoreError, match="set CUTAWAY_HOME to a writable directory"):
        progress_store.write_progress("exercises", TypeAdapter(dict[str, int]), {})
    monkeypatch.delenv("CUTAWAY_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert user_state_dir() == home / "xdg" / "cutaway"


@pytest.mark.parametrize(("text", "number"), [("kv cache", 8), ("Causal", 2), ("11", 11)])
def test_exercise_by_words_of_its_title(run_cli: CliRunner, home: Path, text: str, number: int) -> None:
    assert json.loads(run_cli("learn", "start", text, "--json"))["number"] == number


@pytest.mark.parametrize(("text", "message"), [("softmax", "no title contains"), ("mask", "2 The causal mask; 9 Name")])
def test_unclear_words_list_the_titles(run_cli: CliRunner, home: Path, text: str, message: str) -> None:
    assert message in " ".join(run_cli("learn", "start", text, code=2).replace("│", " ").split())
