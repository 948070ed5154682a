"""One variant from one seed, in a process of its own: trained, measured, and what came of it written down."""

import json
import math
import os
import time
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from cutaway.errors import CutawayError
from cutaway.measure import bits_per_byte
from cutaway.train.ablate.step_costs import peak_of_a_step, seconds_of_a_step
from cutaway.train.ablate.surgery import SURGERY
from cutaway.train.ablate.validation import validation_loss
from cutaway.train.audience import Watcher
from cutaway.train.loop import Loop
from cutaway.train.policy import TrainingError
from cutaway.train.recipe import recipe as read_recipe
from cutaway.train.run import ABOUT
from cutaway.train.start import begin, go_on

OUTCOME = "outcome.json"
OFTEN = 0.2
"""Seconds between two words on how far it is."""


@dataclass(frozen=True)
class Job:
    """What a process is told; plain data, so that it can be sent."""

    directory: str
    recipe: dict[str, Any]
    surgery: str | None
    measure: str | None
    weigh: bool
    """Whether a step's memory is measured: it is the same from every seed."""
    device: str
    threads: int


def work(job: Job, environment: dict[str, str], pipe: "connection.Connection") -> None:
    """What a process does; its words are (kind, what)."""
    Thread(target=leave_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)  # a server of forks has that of the time when it began
    torch.set_num_threads(job.threads)
    try:
        done = carry_out(job, pipe)
    except CutawayError as error:
        pipe.send(("error", str(error)))
    except KeyboardInterrupt:  # before there was anything to save
        pipe.send(("done", False))
    else:
        pipe.send(("done", done))


def leave_with_parent() -> None:
    """When whoever started this is gone, nobody else may find this at work in the run's directory."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def carry_out(job: Job, pipe: "connection.Connection") -> bool:
    """Train to the end, or on to it, and measure; whether the end was reached."""
    directory = Path(job.directory)
    told = 0.0

    def step(row: dict[str, Any], timing: dict[str, Any]) -> None:
        nonlocal told
        if time.monotonic() - told > OFTEN:
            told = time.monotonic()
            pipe.send(("step", row["step"]))

    watcher = Watcher(step=step)
    if (directory / ABOUT).exists():
        loop = go_on(directory, device=job.device, watcher=watcher)
    else:
        loop = begin(read_recipe(job.recipe), directory, device=job.device, watcher=watcher)
    if job.surgery is not None:
        SURGERY[job.surgery](loop.model)
    try:
        loop.go()
    except TrainingError as error:
        write(directory, {"failed": str(error)})
        return True
    if loop.done < loop.recipe.training.steps:
        return False
    if job.surgery is not None:
        drop_model(loop)
    pipe.send(("step", loop.done))
    if math.isfinite(validation_loss(loop)):
        write(directory, found(loop, job))
    else:
        write(directory, {"failed": "its loss is not finite; vary within a lower optimiser.rate"})
    return True


def found(loop: Loop, job: Job) -> dict[str, Any]:
    """What is known of a trained model: where it came to, how long it took, and what was asked to be measured."""
    rows = list(loop.rows)
    looks = [row for row in rows if "validation" in row]
    loss = validation_loss(loop)
    outcome: dict[str, Any] = {
        "loss": loss,
        "seconds": sum(row["seconds"] for row in loop.timings),
        "curve": [[row["step"], row["loss"]] for row in rows if "loss" in row],
        "looks": [[row["step"], row["validation"]] for row in looks],
    }
    if loop.reading.bytes_per_token is not None:
        outcome["bits_per_byte"] = bits_per_byte(loss, loop.reading.bytes_per_token)
    if job.measure is not None:
        from cutaway.train.ablate.measures import MEASURES

        outcome["readings"] = MEASURES[job.measure](loop)
    loop.model.train()
    outcome["step_seconds"] = seconds_of_a_step(loop)  # last of all, for by these it learns on
    if job.weigh:
        outcome["memory"] = peak_of_a_step(loop)
    return outcome


def drop_model(loop: Loop) -> None:
    """What was exported says nothing of the surgery, so whoever loaded it would have another model."""
    import shutil

    shutil.rmtree(loop.run.model, ignore_errors=True)


def write(directory: Path, outcome: dict[str, Any]) -> None:
    draft = directory / f".{OUTCOME}"
    draft.write_text(json.dumps(outcome) + "\n", encoding="utf-8")
    draft.replace(directory / OUTCOME)  # what has it is finished
