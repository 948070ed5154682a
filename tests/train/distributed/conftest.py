"""Fixtures that run training jobs on several processes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RunJob = Callable[..., list[int]]


@pytest.fixture(scope="module")
def runner() -> Iterator["subprocess.Popen[str]"]:
    script = Path(__file__).parents[2] / "support" / "multiprocess_runner.py"
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run(runner: "subprocess.Popen[str]", tmp_path: Path) -> RunJob:
    def run_job(world_size: int, **job: Any) -> list[int]:
        job["environment"] = {"CUTAWAY_CACHE": str(tmp_path / "cache")} | job.get("environment", {})
        assert runner.stdin is not None
        assert runner.stdout is not None
        runner.stdin.write(json.dumps({"world_size": world_size} | job) + "\n")
        runner.stdin.flush()
        exit_codes: list[int] = json.loads(runner.stdout.readline())
        return exit_codes

    return run_job
