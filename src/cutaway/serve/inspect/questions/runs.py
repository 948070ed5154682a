"""A run's own files, as they are by now: losses, samples, how its layers fare."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import Job
from cutaway.serve.inspect.question import Question
from cutaway.serve.inspect.wire import Answer
from cutaway.train.rows import written
from cutaway.train.run import Run

LOG = "metrics.jsonl"
POINTS = 1000
"""Of a line, at most; of a longer run each is the mean of some steps, between their least and their most."""
SAMPLES = 12
QUIET = 120.0
"""Seconds without a new row after which a run is taken to rest."""


class RunLog(Question):
    """Everything of the log, or just that nothing is new since it had so many bytes."""

    seen: Annotated[int, Field(strict=True, ge=0)] = 0

    def answer(self, of: Inspector, job: Job) -> Answer:
        if of.run is None:
            raise InputError("this model is no run's; open a run's directory, such as runs/tiny-python")
        log = of.run / LOG
        size, steps = (log.stat().st_size if log.is_file() else 0), Run.open(of.run).recipe.training.steps
        fresh = log.is_file() and time.time() - log.stat().st_mtime < QUIET
        if size and size == self.seen:
            return Answer({"same": True, "size": size, "training": fresh})
        told = read(log, job) if size else {"steps": [], "looks": [], "health": []}
        done = max((row["step"] for row in told["steps"]), default=0)
        facts = {
            "same": False,
            "size": size,
            "name": of.run.name,
            "of_steps": steps,
            "done": done,
            "training": fresh and done < steps,
            "samples": [row for row in told["looks"] if row.get("sample")][-SAMPLES:],
            "looks": [{name: value for name, value in row.items() if name != "sample"} for row in told["looks"]],
            "health": told["health"][-1] if told["health"] else None,
            "troubles": [
                {"step": row["step"], "said": said} for row in told["health"] for said in row["health"]["troubles"]
            ][-SAMPLES:],
        }
        return Answer(facts, curves(told["steps"]))


def read(log: Path, job: Job) -> dict[str, list[dict[str, Any]]]:
    """Rows by their kind: steps, looks at other data, readings of each layer."""
    found: dict[str, list[dict[str, Any]]] = {"steps": [], "looks": [], "health": []}
    for row in rows(log, job):
        if "health" in row:
            found["health"].append(row)
        elif "validation" in row:
            found["looks"].append(row)
        elif row.get("loss") is not None:
            found["steps"].append(row)
    return found


def rows(log: Path, job: Job) -> Iterator[dict[str, Any]]:
    try:
        for number, row in enumerate(written(log)):
            if number % 4096 == 0:
                job.check()
            yield row
    except json.JSONDecodeError as error:
        raise InputError(f"the run's {LOG} is damaged ({error}); restore it") from None


def curves(steps: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Loss, its bounds, the gradient's length and the rate, over as many points as are drawn."""
    if not steps:
        return {}
    size = -(-len(steps) // POINTS)
    groups = [steps[low : low + size] for low in range(0, len(steps), size)]

    def mean(name: str) -> Tensor:
        found = [[row[name] for row in group if row.get(name) is not None] for group in groups]
        return torch.tensor([sum(each) / len(each) if each else float("nan") for each in found])

    return {
        "step": mean("step"),
        "loss": mean("loss"),
        "least": torch.tensor([min(row["loss"] for row in group) for group in groups]),
        "most": torch.tensor([max(row["loss"] for row in group) for group in groups]),
        "gradient": mean("gradient"),
        "rate": mean("rate"),
    }
