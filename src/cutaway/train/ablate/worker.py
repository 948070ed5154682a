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
from cutaway.evaluate import bits_per_byte
from cutaway.train.ablate.measurements import MEASUREMENTS, eval_loss, peak_step_memory, step_seconds
from cutaway.train.ablate.model_surgery import SURGERIES
from cutaway.train.checkpoint.run_directory import RUN_FILE
from cutaway.train.logging.callbacks import Callback
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.step_policy import TrainingError
from cutaway.train.trainer.trainer import Trainer

OUTCOME_FILE = "outcome.json"
PROGRESS_INTERVAL_SECONDS = 0.2
"""Seconds between two words on how far it is."""


@dataclass(frozen=True)
class Job:
    """What a process is told; plain data, so that it can be sent."""

    directory: str
    recipe: dict[str, Any]
    surgery: str | None
    measurement: str | None
    measure_memory: bool
    """Whether a step's memory is measured: it is the same from every seed."""
    device: str
    num_threads: int


def run_worker(job: Job, env: dict[str, str], pipe: "connection.Connection") -> None:
    """What a process does; its words are (kind, what)."""
    Thread(target=_exit_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)  # a server of forks has that of the time when it began
    torch.set_num_threads(job.num_threads)
    try:
        done = _train_and_measure(job, pipe)
    except CutawayError as error:
        pipe.send(("error", str(error)))
    except KeyboardInterrupt:  # before there was anything to save
        pipe.send(("done", False))
    else:
        pipe.send(("done", done))


def _exit_with_parent() -> None:
    """When whoever started this is gone, nobody else may find this at work in the run's directory."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _train_and_measure(job: Job, pipe: "connection.Connection") -> bool:
    """Train to the end, or on to it, and measure; whether the end was reached."""
    directory = Path(job.directory)
    told = 0.0

    def step(row: dict[str, Any], timing: dict[str, Any]) -> None:
        nonlocal told
        if time.monotonic() - told > PROGRESS_INTERVAL_SECONDS:
            told = time.monotonic()
            pipe.send(("step", row["step"]))

    watcher = Callback(on_step_end=step)
    if (directory / RUN_FILE).exists():
        trainer = resume_trainer(directory, device=job.device, callback=watcher)
    else:
        trainer = prepare_trainer(load_recipe(job.recipe), directory, device=job.device, callback=watcher)
    if job.surgery is not None:
        SURGERIES[job.surgery](trainer.model)
    try:
        trainer.train()
    except TrainingError as error:
        _write_outcome(directory, {"failed": str(error)})
        return True
    if trainer.global_step < trainer.recipe.training.max_steps:
        return False
    if job.surgery is not None:
        _delete_exported_model(trainer)
    pipe.send(("step", trainer.global_step))
    if math.isfinite(eval_loss(trainer)):
        _write_outcome(directory, _collect_outcome(trainer, job))
    else:
        _write_outcome(directory, {"failed": "its loss is not finite; vary within a lower optimizer.lr"})
    return True


def _collect_outcome(trainer: Trainer, job: Job) -> dict[str, Any]:
    """What is known of a trained model: where it came to, how long it took, and what was asked to be measured."""
    rows = list(trainer.metrics_log)
    evals = [row for row in rows if "eval_loss" in row]
    loss = eval_loss(trainer)
    outcome: dict[str, Any] = {
        "loss": loss,
        "seconds": sum(row["seconds"] for row in trainer.timings_log),
        "curve": [[row["step"], row["loss"]] for row in rows if "loss" in row],
        "evals": [[row["step"], row["eval_loss"]] for row in evals],
    }
    if trainer.data.bytes_per_token is not None:
        outcome["bits_per_byte"] = bits_per_byte(loss, trainer.data.bytes_per_token)
    if job.measurement is not None:
        outcome["measurements"] = MEASUREMENTS[job.measurement](trainer)
    trainer.model.train()
    outcome["step_seconds"] = step_seconds(trainer)  # last of all, for by these it learns on
    if job.measure_memory:
        outcome["peak_memory"] = peak_step_memory(trainer)
    return outcome


def _delete_exported_model(trainer: Trainer) -> None:
    """What was exported says nothing of the surgery, so whoever loaded it would have another model."""
    import shutil

    shutil.rmtree(trainer.run_directory.model_directory, ignore_errors=True)


def _write_outcome(directory: Path, outcome: dict[str, Any]) -> None:
    draft = directory / f".{OUTCOME_FILE}"
    draft.write_text(json.dumps(outcome) + "\n", encoding="utf-8")
    draft.replace(directory / OUTCOME_FILE)  # what has it is finished
