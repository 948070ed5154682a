"""Run the configurations of a library in a subprocess, which is started again after a crash or a timeout."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecosystem_report.libraries import ROOT

WORKER = Path(__file__).parent / "worker.py"
Row = dict[str, Any]


def run_library(
    python: Path, library_file: Path, source: Path | None, finished: set[str], timeout: float, log: Path
) -> Iterator[Row]:
    """Yield the messages of the worker: the names of the configurations, then starts and results.

    A configuration that crashes the worker or runs longer than `timeout` seconds has a result with `error`.
    """
    done = set(finished)
    while True:
        running = None
        for message in run_once(python, library_file, source, done, timeout, log):
            if "started" in message:
                running = message["started"]
            if "finished" in message:
                done.add(message["finished"])
                running = None
            if "exit" not in message:
                yield message
        if running is None:
            if message["exit"]:
                raise RuntimeError(f"{library_file.name} {message['exit']}; see {log}")
            return
        done.add(running)
        yield {"finished": running, "error": message["exit"], "counts": {}, "findings": []}


def run_once(
    python: Path, library_file: Path, source: Path | None, skipped: set[str], timeout: float, log: Path
) -> Iterator[Row]:
    """Yield the messages of one worker process, then {"exit": what went wrong, or ""}."""
    environment = os.environ | {"JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [python, WORKER, library_file, source or "", *sorted(skipped)]
    timed_out = threading.Event()
    with log.open("a") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    assert process.stdout is not None

    def stop() -> None:
        timed_out.set()
        process.kill()

    timer = threading.Timer(timeout, stop)
    timer.start()
    try:
        for line in process.stdout:
            timer.cancel()
            timer = threading.Timer(timeout, stop)
            timer.start()
            yield json.loads(line)
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
    yield {"exit": f"ran longer than {timeout:g} s" if timed_out.is_set() else f"exit code {code}" if code else ""}
