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
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import Query
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.metrics_log import read_metrics_log

METRICS_FILE = "metrics.jsonl"
MAX_POINTS = 1000
"""Of a line, at most; of a longer run each is the mean of some steps, between their least and their most."""
MAX_SAMPLES = 12
IDLE_SECONDS = 120.0
"""Seconds without a new row after which a run is taken to rest."""


class RunMetrics(Query):
    """Everything of the log, or just that nothing is new since it had so many bytes."""

    known_bytes: Annotated[int, Field(strict=True, ge=0)] = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if inspector.run_directory is None:
            raise InputError("this model is no run's; open a run's directory, such as runs/tiny-python")
        log = inspector.run_directory / METRICS_FILE
        size, steps = (
            (log.stat().st_size if log.is_file() else 0),
            RunDirectory.open(inspector.run_directory).recipe.training.max_steps,
        )
        fresh = log.is_file() and time.time() - log.stat().st_mtime < IDLE_SECONDS
        if size and size == self.known_bytes:
            return QueryResult({"unchanged": True, "log_bytes": size, "is_training": fresh})
        told = _read_metrics(log, job) if size else {"steps": [], "evals": [], "layer_stats": []}
        done = max((row["step"] for row in told["steps"]), default=0)
        facts = {
            "unchanged": False,
            "log_bytes": size,
            "name": inspector.run_directory.name,
            "max_steps": steps,
            "step": done,
            "is_training": fresh and done < steps,
            "samples": [row for row in told["evals"] if row.get("sample")][-MAX_SAMPLES:],
            "evals": [{name: value for name, value in row.items() if name != "sample"} for row in told["evals"]],
            "layer_stats": told["layer_stats"][-1] if told["layer_stats"] else None,
            "warnings": [
                {"step": row["step"], "message": message}
                for row in told["layer_stats"]
                for message in row["layer_stats"]["warnings"]
            ][-MAX_SAMPLES:],
        }
        return QueryResult(facts, downsample_curves(told["steps"]))


def _read_metrics(path: Path, job: QueryJob) -> dict[str, list[dict[str, Any]]]:
    """Rows by their kind: steps, looks at other data, readings of each layer."""
    found: dict[str, list[dict[str, Any]]] = {"steps": [], "evals": [], "layer_stats": []}
    for row in _iter_rows(path, job):
        if "layer_stats" in row:
            found["layer_stats"].append(row)
        elif "eval_loss" in row:
            found["evals"].append(row)
        elif row.get("loss") is not None:
            found["steps"].append(row)
    return found


def _iter_rows(path: Path, job: QueryJob) -> Iterator[dict[str, Any]]:
    try:
        for number, row in enumerate(read_metrics_log(path)):
            if number % 4096 == 0:
                job.check_cancelled()
            yield row
    except json.JSONDecodeError as error:
        raise InputError(f"the run's {METRICS_FILE} is damaged ({error}); restore it") from None


def downsample_curves(step_rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Loss, its bounds, the gradient's length and the rate, over as many points as are drawn."""
    if not step_rows:
        return {}
    size = -(-len(step_rows) // MAX_POINTS)
    groups = [step_rows[low : low + size] for low in range(0, len(step_rows), size)]

    def mean(name: str) -> Tensor:
        found = [[row[name] for row in group if row.get(name) is not None] for group in groups]
        return torch.tensor([sum(each) / len(each) if each else float("nan") for each in found])

    return {
        "step": mean("step"),
        "loss": mean("loss"),
        "loss_min": torch.tensor([min(row["loss"] for row in group) for group in groups]),
        "loss_max": torch.tensor([max(row["loss"] for row in group) for group in groups]),
        "grad_norm": mean("grad_norm"),
        "lr": mean("lr"),
    }
