"""Worker process of an ablation: trains and measures one variant with one seed, and writes its outcome."""

import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from cutaway.errors import CutawayError
from cutaway.evaluate import bits_per_byte
from cutaway.lens.edit import edit
from cutaway.train.ablate.measurements import MEASUREMENTS, eval_loss, peak_step_memory, step_seconds
from cutaway.train.ablate.vary import Override
from cutaway.train.checkpoint.run_directory import RUN_FILE
from cutaway.train.logging.callbacks import Callback
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.schema import Recipe
from cutaway.train.trainer.bad_step_policy import TrainingError
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.trainer import Trainer
from cutaway.user_files import write_text_atomically

OUTCOME_FILE = "outcome.json"
Outcome = dict[str, Any]
"""Losses, time, memory and measurements of a run. A failed run has only the key `failed`, with the reason."""
PROGRESS_INTERVAL_SECONDS = 0.2
"""Minimum time between two progress messages."""


@dataclass(frozen=True)
class Job:
    """Arguments of a worker process. All fields can be pickled."""

    directory: str
    recipe: Recipe
    edits: tuple[Override, ...]
    measurement: str | None
    measure_memory: bool
    """Whether to measure the memory of a step. One seed is enough, because all seeds need the same memory."""
    device: str
    num_threads: int


def run_worker(job: Job, env: dict[str, str], pipe: "connection.Connection") -> None:
    """Train and measure the run of a job, and send messages (kind, value) to the parent process through `pipe`.

    The kind is 'step' with the step number, 'error' with the error message, or 'done' with False if the run was
    interrupted and True otherwise.
    """
    Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)  # the fork server has the environment from when it was started
    torch.set_num_threads(job.num_threads)
    try:
        is_finished = _train_and_measure(job, pipe)
    except CutawayError as error:
        pipe.send(("error", str(error)))
    except KeyboardInterrupt:  # only before training starts, when there is nothing to save
        pipe.send(("done", False))
    else:
        pipe.send(("done", is_finished))


def _exit_with_parent() -> None:
    """Wait until the parent process ends, then exit, because another process may then write to the run directory."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _train_and_measure(job: Job, pipe: "connection.Connection") -> bool:
    """Train from the start or from the last checkpoint, measure the model, and write the outcome.

    Returns False if training was interrupted, otherwise True. The outcome of a failed run is the reason.
    """
    directory = Path(job.directory)
    last_report = 0.0

    def report_step(metrics: Metrics, timing: Metrics) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > PROGRESS_INTERVAL_SECONDS:
            last_report = time.monotonic()
            pipe.send(("step", metrics["step"]))

    callback = Callback(on_step_end=report_step)
    if (directory / RUN_FILE).exists():
        trainer = resume_trainer(directory, device=job.device, callback=callback)
    else:
        trainer = prepare_trainer(job.recipe, directory, device=job.device, callback=callback)
    if job.edits:
        edit(trainer.model, dict(job.edits)).__enter__()  # not undone, because the process ends with the job
    try:
        trainer.train()
    except TrainingError as error:
        _write_outcome(directory, {"failed": str(error)})
        return True
    if trainer.global_step < trainer.recipe.training.max_steps:
        return False
    if job.edits:  # the exported config does not include the edits, so another model would be loaded
        shutil.rmtree(trainer.run_directory.model_directory, ignore_errors=True)
    pipe.send(("step", trainer.global_step))
    loss = eval_loss(trainer)
    if math.isfinite(loss):
        _write_outcome(directory, _collect_outcome(trainer, job, loss))
    else:
        _write_outcome(directory, {"failed": "the loss is not finite; lower optimizer.lr"})
    return True


def _collect_outcome(trainer: Trainer, job: Job, loss: float) -> Outcome:
    """Losses, time and memory of a trained model, and the measurement that the plan requests."""
    rows = list(trainer.metrics_log)
    outcome: Outcome = {
        "loss": loss,
        "seconds": sum(row["seconds"] for row in trainer.timings_log),
        "curve": [[row["step"], row["loss"]] for row in rows if "loss" in row],
        "evals": [[row["step"], row["eval_loss"]] for row in rows if "eval_loss" in row],
    }
    if trainer.data.bytes_per_token is not None:
        outcome["bits_per_byte"] = bits_per_byte(loss, trainer.data.bytes_per_token)
    if job.measurement is not None:
        outcome["measurements"] = MEASUREMENTS[job.measurement](trainer)
    trainer.model.train()
    outcome["step_seconds"] = step_seconds(trainer)  # after the measurements, because timed steps change the weights
    if job.measure_memory:
        outcome["peak_memory"] = peak_step_memory(trainer)
    return outcome


def _write_outcome(directory: Path, outcome: Outcome) -> None:
    write_text_atomically(directory / OUTCOME_FILE, json.dumps(outcome) + "\n")  # a run with this file is finished
