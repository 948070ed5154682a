"""Runs a training in child processes that are killed one after another, until one finishes.

    python tests/support/crash_runner.py RECIPE RUN SEED COUNT FAILPOINT…

Starts one child per failpoint, then children that are killed after random times, until COUNT children were killed.
Children are forks, so torch is imported once. Prints the number of killed children.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.bad_step_policy import TrainingError
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer


def start_child(source: str, run: Path, failpoint: str | None) -> int:
    """Fork a child that starts or resumes the run; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if failpoint is not None:
            os.environ["CUTAWAY_FAILPOINT"] = failpoint
        trainer = (
            resume_trainer(run, device="cpu")
            if (run / "run.json").exists()
            else prepare_trainer(load_recipe(source), run, device="cpu")
        )
        trainer.train()
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(3 if isinstance(error, TrainingError) else 4)
    os._exit(0)


def main() -> None:
    source, run, seed, count, *failpoints = sys.argv[1:]
    rng, num_killed, directory = random.Random(int(seed)), 0, Path(run)
    for failpoint in failpoints:
        status = os.waitpid(start_child(source, directory, failpoint), 0)[1]
        if os.WIFSIGNALED(status):
            num_killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(f"at {failpoint}: exit code {os.WEXITSTATUS(status)}")
    for _ in range(20 * int(count)):
        if num_killed >= int(count):
            break
        pid = start_child(source, directory, None)
        time.sleep(rng.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            num_killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(f"exit code {os.WEXITSTATUS(status)}")
    status = os.waitpid(start_child(source, directory, None), 0)[1]
    if status:
        sys.exit(f"last child: status {status}")
    sys.stdout.write(f"{num_killed}\n")


main()
