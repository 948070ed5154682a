"""Carries out a run in children that are killed, one after another, until one gets to the end.

    python tests/support/crash_runner.py RECIPE RUN SEED COUNT POINT…

First one child for each failpoint, then children that are killed after random times, COUNT kills in all. torch is
imported once: the children are forks. Prints how many were killed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.step_policy import TrainingError


def child(source: str, run: Path, point: str | None) -> int:
    """Begin or resume, to be killed on the way."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if point is not None:
            os.environ["CUTAWAY_FAILPOINT"] = point
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
    source, run, seed, count, *points = sys.argv[1:]
    dice, killed, directory = random.Random(int(seed)), 0, Path(run)
    for point in points:
        status = os.waitpid(child(source, directory, point), 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(f"at {point}: exit code {os.WEXITSTATUS(status)}")
    for _ in range(20 * int(count)):
        if killed >= int(count):
            break
        pid = child(source, directory, None)
        time.sleep(dice.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
        elif os.WEXITSTATUS(status):
            sys.exit(f"exit code {os.WEXITSTATUS(status)}")
    status = os.waitpid(child(source, directory, None), 0)[1]
    if status:
        sys.exit(f"the last one: status {status}")
    sys.stdout.write(f"{killed}\n")


main()
