"""Query: metrics log of a training run (losses, samples, layer statistics)."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult
from cutaway.train.checkpoint.run_directory import RunDirectory
from cutaway.train.logging.metrics_log import read_metrics_log

METRICS_FILE = "metrics.jsonl"
MAX_POINTS = 1000
"""Maximum number of points per curve. In longer runs, a point is the mean over a group of steps."""
MAX_SAMPLES = 12
IDLE_SECONDS = 120.0
"""A run counts as stopped if its log has had no new row for this many seconds."""


Row = dict[str, Any]


class RunMetrics(Query):
    """Metrics of a training run. If the log size is still `known_bytes`, the result is `unchanged`, without metrics."""

    known_bytes: Annotated[int, Field(strict=True, ge=0)] = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if inspector.run_directory is None:
            raise InputError("this model is not from a run directory; open a run directory, such as runs/tiny-python")
        log_path = inspector.run_directory / METRICS_FILE
        max_steps = RunDirectory.open(inspector.run_directory).recipe.training.max_steps
        log_bytes, modified_time = 0, 0.0
        if log_path.is_file():
            stat = log_path.stat()
            log_bytes, modified_time = stat.st_size, stat.st_mtime
        is_recent = time.time() - modified_time < IDLE_SECONDS
        if log_bytes and log_bytes == self.known_bytes:
            return QueryResult({"unchanged": True, "log_bytes": log_bytes, "is_training": is_recent})
        steps, evals, layer_stats = _read_metrics(log_path, job) if log_bytes else ([], [], [])
        last_step = max((row["step"] for row in steps), default=0)
        warnings = [(row["step"], message) for row in layer_stats for message in row["layer_stats"]["warnings"]]
        data = {
            "unchanged": False,
            "log_bytes": log_bytes,
            "name": inspector.run_directory.name,
            "max_steps": max_steps,
            "step": last_step,
            "is_training": is_recent and last_step < max_steps,
            "samples": [row for row in evals if row.get("sample")][-MAX_SAMPLES:],
            "evals": [{name: value for name, value in row.items() if name != "sample"} for row in evals],
            "layer_stats": layer_stats[-1] if layer_stats else None,
            "warnings": [{"step": step, "message": message} for step, message in warnings[-MAX_SAMPLES:]],
        }
        return QueryResult(data, downsample_curves(steps))


def _read_metrics(path: Path, job: QueryJob) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the log's rows by kind: training steps, evaluations, layer statistics."""
    steps: list[Row] = []
    evals: list[Row] = []
    layer_stats: list[Row] = []
    try:
        for number, row in enumerate(read_metrics_log(path)):
            if number % 4096 == 0:
                job.check_cancelled()
            if "layer_stats" in row:
                layer_stats.append(row)
            elif "eval_loss" in row:
                evals.append(row)
            elif row.get("loss") is not None:
                steps.append(row)
    except json.JSONDecodeError as error:
        raise InputError(f"the run's {METRICS_FILE} is not valid JSON lines ({error}); restore it") from None
    return steps, evals, layer_stats


def downsample_curves(step_rows: list[Row]) -> dict[str, Tensor]:
    """Return mean loss, gradient norm and learning rate, and loss range, of at most MAX_POINTS groups of steps."""
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
