"""Runs code in child processes that are forks of this one, so that torch is imported once.

Reads one job per line: {"code": …, "environment": {…}, "output": a file}; writes the exit code of each child, negative
for a signal. The output of a child goes to the file.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any

for module in ("pytest", "torch", "cutaway.cli", "cutaway.train.trainer.launch"):
    import_module(module)  # once, before the forks


def start_child(job: dict[str, Any]) -> int:
    """Fork a child that runs the job's code; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, descriptor)
    os.environ |= job["environment"]
    status = 0
    try:
        exec(job["code"], {"__name__": "__main__"})
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 4
    sys.exit(status)


def main() -> None:
    for line in sys.stdin:
        status = os.waitpid(start_child(json.loads(line)), 0)[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


main()
