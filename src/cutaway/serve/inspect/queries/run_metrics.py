"""Query: metrics log of a training run (losses, samples, layer statistics)."""

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
"""Maximum number of points per curve; longer runs are averaged over groups of steps, with minimum and maximum."""
MAX_SAMPLES = 12
IDLE_SECONDS = 120.0
"""Seconds without a new row after which a run counts as stopped."""


class RunMetrics(Query):
    """The metrics log, or `unchanged` if it still has `known_bytes` bytes."""

    known_bytes: Annotated[int, Field(strict=True, ge=0)] = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if inspector.run_directory is None:
            raise InputError("this model is not from a run directory; open a run directory, such as runs/tiny-python")
        log_path = inspector.run_directory / METRICS_FILE
        log_bytes, max_steps = (
            (log_path.stat().st_size if log_path.is_file() else 0),
            RunDirectory.open(inspector.run_directory).recipe.training.max_steps,
        )
        is_recent = log_path.is_file() and time.time() - log_path.stat().st_mtime < IDLE_SECONDS
        if log_bytes and log_bytes == self.known_bytes:
            return QueryResult({"unchanged": True, "log_bytes": log_bytes, "is_training": is_recent})
        rows_by_kind = _read_metrics(log_path, job) if log_bytes else {"steps": [], "evals": [], "layer_stats": []}
        last_step = max((row["step"] for row in rows_by_kind["steps"]), default=0)
        data = {
            "unchanged": False,
            "log_bytes": log_bytes,
            "name": inspector.run_directory.name,
            "max_steps": max_steps,
            "step": last_step,
            "is_training": is_recent and last_step < max_steps,
            "samples": [row for row in rows_by_kind["evals"] if row.get("sample")][-MAX_SAMPLES:],
            "evals": [
                {name: value for name, value in row.items() if name != "sample"} for row in rows_by_kind["evals"]
            ],
            "layer_stats": rows_by_kind["layer_stats"][-1] if rows_by_kind["layer_stats"] else None,
            "warnings": [
                {"step": row["step"], "message": message}
                for row in rows_by_kind["layer_stats"]
                for message in row["layer_stats"]["warnings"]
            ][-MAX_SAMPLES:],
        }
        return QueryResult(data, downsample_curves(rows_by_kind["steps"]))


def _read_metrics(path: Path, job: QueryJob) -> dict[str, list[dict[str, Any]]]:
    """Group the log's rows by kind: training steps, evaluations, layer statistics."""
    rows_by_kind: dict[str, list[dict[str, Any]]] = {"steps": [], "evals": [], "layer_stats": []}
    for row in _iter_rows(path, job):
        if "layer_stats" in row:
            rows_by_kind["layer_stats"].append(row)
        elif "eval_loss" in row:
            rows_by_kind["evals"].append(row)
        elif row.get("loss") is not None:
            rows_by_kind["steps"].append(row)
    return rows_by_kind


def _iter_rows(path: Path, job: QueryJob) -> Iterator[dict[str, Any]]:
    try:
        for number, row in enumerate(read_metrics_log(path)):
            if number % 4096 == 0:
                job.check_cancelled()
            yield row
    except json.JSONDecodeError as error:
        raise InputError(f"the run's {METRICS_FILE} is not valid JSON lines ({error}); restore it") from None


def downsample_curves(step_rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Average loss (with minimum and maximum), gradient norm and learning rate over groups of steps."""
    if not step_rows:
        return {}
    group_size = -(-len(step_rows) // MAX_POINTS)
    groups = [step_rows[start : start + group_size] for start in range(0, len(step_rows), group_size)]

    def mean(name: str) -> Tensor:
        values_by_group = [[row[name] for row in group if row.get(name) is not None] for group in groups]
        return torch.tensor([sum(values) / len(values) if values else float("nan") for values in values_by_group])

    return {
        "step": mean("step"),
        "loss": mean("loss"),
        "loss_min": torch.tensor([min(row["loss"] for row in group) for group in groups]),
        "loss_max": torch.tensor([max(row["loss"] for row in group) for group in groups]),
        "grad_norm": mean("grad_norm"),
        "lr": mean("lr"),
    }
