"""A learner's program may do what it likes: it is told so in a sentence, and nothing of it is left behind."""

import time
from pathlib import Path

import pytest

from cutaway.learn.exercises import Exercise, get_exercise, load_exercises
from cutaway.learn.runner.launcher import grade_files

pytestmark = pytest.mark.unchecked
COUNTING = get_exercise(4)  # needs no torch, so that a child begins at once
LOOP = "def f():\n    while True:\n        try:\n            pass\n        except Exception:\n            pass\nf()"
HARMLESS = {
    "exit": ("import sys\nsys.exit(3)", "ends itself by exit()", "line 2 of exit.py: sys.exit(3)"),
    "memory": ("x = bytearray(10 * 10**9)", "asked for more memory", "line 1 of memory.py: x = bytearray(10 * 10**9)"),
    "syntax": ("def f(:\n", "is no Python", "line 1 of syntax.py: def f(:"),
    "input": ("input('name?')", "waits for something to be typed", "line 1 of input.py: input('name?')"),
    "raises": ("import math\nmath.sqrt(-1)", "raised ValueError", "line 2 of raises.py: math.sqrt(-1)"),
    "file": ("open('big', 'wb').truncate(1 << 40)", "raised OSError", "line 1 of file.py"),
    "loop": (LOOP, "ran longer than 1 s", "of loop.py: "),
    "zeros": ("\0", "is no Python", ""),
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def test_programs_that_go_wrong_are_told_so_one_after_another(tmp_path: Path) -> None:
    paths = [written(tmp_path, name, text) for name, (text, *_) in HARMLESS.items()]
    good = written(tmp_path, "good", "print('hello')\n" + COUNTING.solution)
    *found, last = grade_files(COUNTING, [*paths, good], time_limit=1)
    for (name, (_, said, at)), each in zip(HARMLESS.items(), found, strict=True):
        assert each.status == "error", name
        assert said in each.message, name
        assert at in each.location, name
    assert last.passed
    assert "hello" in last.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nos._exit(3)", "ended the whole process with exit code 3"),
        ("import ctypes\nctypes.string_at(0)", "ended by SIGSEGV"),
        (
            "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass",
            "is there a loop that never ends?",  # told by the clock or by its own time, whichever is over first
        ),
    ],
)
def test_programs_that_end_the_process_are_told_how(text: str, said: str, tmp_path: Path) -> None:
    (found,) = grade_files(COUNTING, [written(tmp_path, "bad", text)], time_limit=1)
    assert found.status == "error"
    assert said in found.message


def test_a_million_prints_are_cut_and_children_are_ended(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    beating = f"import time\nwhile True:\n    open({str(beats)!r}, 'a').write('x')\n    time.sleep(0.02)"
    text = (
        "import pathlib, subprocess, sys, time\nprint('x\\n' * 1_000_000)\n"
        f"subprocess.Popen([sys.executable, '-c', {beating!r}])\n"
        f"while not pathlib.Path({str(beats)!r}).exists():\n    time.sleep(0.02)\n"
    )
    (found,) = grade_files(COUNTING, [written(tmp_path, "mine", text + COUNTING.solution)])
    assert found.passed
    assert len(found.output) < 10_000
    assert "bytes were printed; the rest is left out" in found.output
    heard = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == heard


def test_secrets_of_the_environment_are_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    text = "import os\nprint(os.environ.get('HF_TOKEN'), os.getcwd(), __file__)\n"
    (found,) = grade_files(COUNTING, [written(tmp_path, "mine", text + COUNTING.solution)])
    assert "None" in found.output
    assert "hush-hush" not in found.output
    assert str(tmp_path / "mine.py") in found.output
    assert found.passed


def test_torch_has_room_in_the_child_and_no_more_than_that(tmp_path: Path) -> None:
    one = get_exercise(1)
    greedy = (
        "import torch\nattention_weights = lambda q, k: torch.zeros(10**10)\n"
        "def attention(q, k, v):\n    raise SystemExit\n"
    )
    right, wrong = grade_files(one, [written(tmp_path, "right", one.solution), written(tmp_path, "wrong", greedy)])
    assert right.passed
    assert "asked for more memory than an exercise may have" in wrong.tasks[0]["message"]
    assert "ends itself by exit()" in wrong.tasks[1]["message"]


@pytest.mark.nightly
@pytest.mark.parametrize("one", load_exercises(), ids=lambda one: one.slug)
def test_each_solution_passes_in_a_child_of_its_own(one: Exercise, tmp_path: Path) -> None:
    right, blank = grade_files(one, [written(tmp_path, "right", one.solution), written(tmp_path, "blank", one.stub)])
    assert right.passed
    assert blank.status == "not_written"
