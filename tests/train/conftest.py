"""Fixtures of the training tests."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RunForked = Callable[..., tuple[int, str]]


@pytest.fixture
def skip_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start training without the preflight checks; test_preflight.py runs them."""
    monkeypatch.setattr("cutaway.train.trainer.launch.run_preflight", lambda *_: None)


@pytest.fixture(scope="session")
def fork_runner() -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).parents[1] / "support" / "fork_runner.py"
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_forked(fork_runner: "subprocess.Popen[str]", tmp_path_factory: pytest.TempPathFactory) -> RunForked:
    """Run code in a new process that has imported torch; returns the exit code and the output."""

    def run(code: str, **environment: str) -> tuple[int, str]:
        output = tmp_path_factory.mktemp("forked") / "output.txt"
        assert fork_runner.stdin is not None
        assert fork_runner.stdout is not None
        job = {"code": code, "environment": environment, "output": str(output)}
        fork_runner.stdin.write(json.dumps(job) + "\n")
        fork_runner.stdin.flush()
        return int(fork_runner.stdout.readline()), output.read_text()

    return run
