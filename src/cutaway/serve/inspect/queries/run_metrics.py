"""Query: state and metrics of a training run (losses, gradient norm, update ratios, samples, warnings)."""

import json
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.serve.inspect.open_run import METRICS_FILE, OpenRun
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

MAX_POINTS = 1000
"""Maximum number of points per curve. In longer runs, a point is the mean over a group of steps."""
MAX_SAMPLES = 12
"""Maximum number of samples and warnings. Samples are evenly spaced over the evaluations."""
MAX_LAYER_POINTS = 200
"""Maximum number of evaluations whose update ratios are shown."""
NUM_TIMED_STEPS = 50
"""Number of last steps from which the remaining time is estimated."""

Row = dict[str, Any]


def require_run(inspector: Inspector) -> OpenRun:
    """The run that the model is from. Raises InputError if there is none."""
    if inspector.run is None:
        raise InputError("this model is not from a run directory; open a run directory, such as runs/first")
    return inspector.run


class RunMetrics(Query):
    """State and metrics of a training run.

    If the log has still `known_rows` rows, the result is `unchanged` and has only the state.
    """

    known_rows: Annotated[int, Field(strict=True, ge=0)] = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        run = require_run(inspector)
        is_training = run.is_training()  # before the log is read, so that the log of a finished run is complete
        with run.lock:
            try:
                rows, timings = list(run.metrics.read()), list(run.timings.read())
            except json.JSONDecodeError as error:
                raise InputError(f"the run's {METRICS_FILE} is not valid JSON lines ({error}); restore it") from None
        steps = [row for row in rows if row.get("loss") is not None]
        step = max((row["step"] for row in steps), default=0)
        data = {
            "num_rows": len(rows),
            "state": find_state(step, step if run.is_exported else run.max_steps, is_training),
            "step": step,
            "max_steps": run.max_steps,
            "seconds_left": _estimate_seconds_left(timings, run.max_steps - step),
        }
        if rows and len(rows) == self.known_rows:
            return QueryResult(data | {"unchanged": True})
        evals = [row for row in rows if "eval_loss" in row]
        layer_stats = [row for row in rows if "layer_stats" in row]
        warnings = [(row["step"], message) for row in layer_stats for message in row["layer_stats"]["warnings"]]
        data |= {
            "unchanged": False,
            "name": run.name,
            "directory": str(run.directory.directory),
            "sample_prompt": next(iter(run.directory.recipe.eval.sample_prompts), None),
            "samples": select_evenly([row for row in evals if row.get("sample")], MAX_SAMPLES),
            "evals": [{name: value for name, value in row.items() if name != "sample"} for row in evals],
            "layer_stats": layer_stats[-1] if layer_stats else None,
            "warnings": [{"step": step, "message": message} for step, message in warnings[-MAX_SAMPLES:]],
        }
        update_ratios, layers = collect_update_ratios(layer_stats)
        return QueryResult(
            data | {"update_ratio_layers": layers},
            downsample_curves(steps) | update_ratios | downsample_timings(timings),
        )


def find_state(step: int, max_steps: int, is_training: bool) -> Literal["training", "stopped", "finished"]:
    if is_training:
        return "training"
    return "finished" if step >= max_steps else "stopped"


def _estimate_seconds_left(timings: list[Row], num_steps: int) -> float | None:
    """Remaining steps × mean duration of the last steps. None before the first step."""
    seconds = [row["seconds"] for row in timings[-NUM_TIMED_STEPS:]]
    return num_steps * sum(seconds) / len(seconds) if seconds else None


def select_evenly(rows: list[Row], count: int) -> list[Row]:
    """At most `count` of the rows, evenly spaced, with the first and the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(index * (len(rows) - 1) / (count - 1))] for index in range(count)]


def collect_update_ratios(layer_stats: list[Row]) -> tuple[dict[str, Tensor], list[str]]:
    """Return update ratios by layer and evaluation (L, E) with their steps, and the names of the layers."""
    rows = select_evenly([row for row in layer_stats if row["layer_stats"].get("update_ratio")], MAX_LAYER_POINTS)
    if not rows:
        return {}, []
    layers = list(rows[-1]["layer_stats"]["update_ratio"])
    ratios = [[_to_float(row["layer_stats"]["update_ratio"].get(layer)) for row in rows] for layer in layers]
    steps = torch.tensor([row["step"] for row in rows])
    return {"update_ratio_step": steps, "update_ratio": torch.tensor(ratios)}, layers


def _to_float(value: float | None) -> float:
    return float("nan") if value is None else value


def _split_into_groups(rows: list[Row]) -> list[list[Row]]:
    group_size = max(1, -(-len(rows) // MAX_POINTS))
    return [rows[start : start + group_size] for start in range(0, len(rows), group_size)]


def _mean_by_group(groups: list[list[Row]], name: str) -> Tensor:
    values_by_group = [[row[name] for row in group if row.get(name) is not None] for group in groups]
    return torch.tensor([sum(values) / len(values) if values else float("nan") for values in values_by_group])


def downsample_curves(step_rows: list[Row]) -> dict[str, Tensor]:
    """Return mean loss, gradient norm, learning rate and, if there are rewards, reward, and the range of the loss, of
    at most MAX_POINTS groups of steps."""
    if not step_rows:
        return {}
    groups = _split_into_groups(step_rows)
    names = ["step", "loss", "grad_norm", "lr", *(["reward"] if "reward" in step_rows[-1] else [])]
    means = {name: _mean_by_group(groups, name) for name in names}
    return means | {
        "loss_min": torch.tensor([min(row["loss"] for row in group) for group in groups]),
        "loss_max": torch.tensor([max(row["loss"] for row in group) for group in groups]),
    }


def downsample_timings(timings: list[Row]) -> dict[str, Tensor]:
    """Return the mean throughput of at most MAX_POINTS groups of steps."""
    if not timings:
        return {}
    groups = _split_into_groups(timings)
    return {
        "timing_step": _mean_by_group(groups, "step"),
        "tokens_per_second": _mean_by_group(groups, "tokens_per_second"),
    }
