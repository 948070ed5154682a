"""The launcher: failures of a learner's program are reported in one sentence, and its processes are killed."""

import time
from pathlib import Path

import pytest

from cutaway.learn.exercises import Exercise, get_exercise, load_exercises
from cutaway.learn.runner.launcher import grade_files

pytestmark = pytest.mark.unchecked
COUNTING = get_exercise(4)  # imports no torch, so that the worker starts at once
LOOP = "def f():\n    while True:\n        try:\n            pass\n        except Exception:\n            pass\nf()"
FAILURES = {
    "exit": ("import sys\nsys.exit(3)", "calls exit()", "line 2 of exit.py: `sys.exit(3)`"),
    "memory": (
        "x = bytearray(10 * 10**9)",
        "exceeded the memory limit",
        "line 1 of memory.py: `x = bytearray(10 * 10**9)`",
    ),
    "syntax": ("def f(:\n", "is not valid Python", "line 1 of syntax.py: def f(:"),
    "input": ("input('name?')", "waits for keyboard input", "line 1 of input.py: `input('name?')`"),
    "raises": ("import math\nmath.sqrt(-1)", "raised ValueError", "line 2 of raises.py: `math.sqrt(-1)`"),
    "file": ("open('big', 'wb').truncate(1 << 40)", "raised OSError", "line 1 of file.py"),
    "loop": (LOOP, "ran longer than 1 s", "of loop.py: "),
    "zeros": ("\0", "is not valid Python", ""),
}


def write_file(directory: Path, name: str, text: str) -> Path:
    path = directory / f"{name}.py"
    path.write_text(text)
    return path


def test_failures_are_reported_one_after_another(tmp_path: Path) -> None:
    paths = [write_file(tmp_path, name, text) for name, (text, *_) in FAILURES.items()]
    good = write_file(tmp_path, "good", "print('hello')\n" + COUNTING.solution)
    *reports, last = grade_files(COUNTING, [*paths, good], time_limit=1)
    for (name, (_, message, location)), report in zip(FAILURES.items(), reports, strict=True):
        assert report.status == "error", name
        assert message in report.message, name
        assert location in report.location, name
    assert last.passed
    assert "hello" in last.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nos._exit(3)", "ended the process with exit code 3"),
        ("import ctypes\nctypes.string_at(0)", "ended by SIGSEGV"),
        (
            "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass",
            "is there an infinite loop?",  # from the timeout or the CPU time limit, whichever comes first
        ),
    ],
)
def test_exit_of_the_process_is_reported(text: str, message: str, tmp_path: Path) -> None:
    (report,) = grade_files(COUNTING, [write_file(tmp_path, "bad", text)], time_limit=1)
    assert report.status == "error"
    assert message in report.message


def test_long_output_is_truncated_and_child_processes_are_killed(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    beating = f"import time\nwhile True:\n    open({str(beats)!r}, 'a').write('x')\n    time.sleep(0.02)"
    script = write_file(tmp_path, "beating", beating)
    text = (
        "import ctypes, pathlib, sys, time\nprint('x\\n' * 1_000_000)\n"
        f"ctypes.CDLL(None).system(f'{{sys.executable}} {script} &'.encode())\n"  # Python code cannot start processes
        f"while not pathlib.Path({str(beats)!r}).exists():\n    time.sleep(0.02)\n"
    )
    (report,) = grade_files(COUNTING, [write_file(tmp_path, "mine", text + COUNTING.solution)])
    assert report.passed
    assert len(report.output) < 10_000
    assert "bytes were printed; the rest is omitted" in report.output
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size


def test_environment_secrets_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-hush")
    text = "import os\nprint(os.environ.get('HF_TOKEN'), os.getcwd(), __file__)\n"
    (report,) = grade_files(COUNTING, [write_file(tmp_path, "mine", text + COUNTING.solution)])
    assert "None" in report.output
    assert "hush-hush" not in report.output
    assert str(tmp_path / "mine.py") in report.output
    assert report.passed


def test_memory_limit_allows_torch(tmp_path: Path) -> None:
    exercise = get_exercise(1)
    too_much_memory = (
        "import torch\nattention_weights = lambda q, k: torch.zeros(10**10)\n"
        "def attention(q, k, v):\n    raise SystemExit\n"
    )
    right, wrong = grade_files(
        exercise, [write_file(tmp_path, "right", exercise.solution), write_file(tmp_path, "wrong", too_much_memory)]
    )
    assert right.passed
    assert "exceeded the memory limit of an exercise" in wrong.tasks[0].message
    assert "calls exit()" in wrong.tasks[1].message


@pytest.mark.nightly
@pytest.mark.parametrize("exercise", load_exercises(), ids=lambda exercise: exercise.slug)
def test_every_solution_passes_in_a_worker(exercise: Exercise, tmp_path: Path) -> None:
    right, blank = grade_files(
        exercise, [write_file(tmp_path, "right", exercise.solution), write_file(tmp_path, "blank", exercise.stub)]
    )
    assert right.passed
    assert blank.status == "not_written"
