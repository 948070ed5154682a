"""Plots of ablation results: loss curves, final losses, gradient norms by depth."""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cutaway.evaluate.confidence_interval import mean_confidence_interval
from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE, TEXT_COLOR
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.results import ResultsTable
from cutaway.train.ablate.worker import Outcome

if TYPE_CHECKING:  # matplotlib is imported only to draw
    from matplotlib.axes import Axes

LINE_STYLES = ("-", "--", ":")
CURVE_POINTS = 24
"""Approximate number of points of a curve. Each point is an average over several steps."""
BAND_LABEL = "{} seeds, seed effect removed, 95 % CI of the mean"


def plot_results(data: ResultsTable, output_dir: Path) -> list[Path]:
    """Write the plots curves.svg, losses.svg and, if gradients were measured, gradients.svg. Return their paths."""
    height = 0.36 * len(data["variants"]) + 1.4
    paths = [_save_figure(output_dir / "curves.svg", (7.5, 4.2), lambda axes: _plot_loss_curves(axes, data))]
    paths.append(_save_figure(output_dir / "losses.svg", (7.5, height), lambda axes: _plot_final_losses(axes, data)))
    if any(row["metric"] == "grad_norm" for row in data["measurements"]):
        paths.append(_save_figure(output_dir / "gradients.svg", (7.5, 4.2), lambda axes: _plot_grad_norms(axes, data)))
    return paths


def _save_figure(path: Path, size: tuple[float, float], draw: Callable[["Axes"], None]) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        figure.savefig(path, metadata={"Date": None})
    return path


def _variant_styles(data: ResultsTable) -> list[tuple[str, str]]:
    """Color and line style of each variant in the plots."""
    count = len(data["variants"])
    return [
        (LINE_COLORS[index % len(LINE_COLORS)], LINE_STYLES[index // len(LINE_COLORS) % len(LINE_STYLES)])
        for index in range(count)
    ]


def _finished_runs(data: ResultsTable, name: str) -> list[Outcome]:
    return [run for run in data["runs"] if run["variant"] == name and "failed" not in run]


def _plot_loss_curves(axes: "Axes", data: ResultsTable) -> None:
    """Plot the training loss, averaged over a few steps and over seeds, with the confidence interval as a band."""
    runs_by_variant = {row["variant"]: _finished_runs(data, row["variant"]) for row in data["variants"]}
    curves = {name: [_downsample_curve(run["curve"]) for run in runs] for name, runs in runs_by_variant.items()}
    for row, (color, line_style) in zip(data["variants"], _variant_styles(data), strict=True):
        if not curves[row["variant"]]:
            continue
        steps = [step for step, _ in curves[row["variant"]][0]]
        losses = [[loss for _, loss in curve] for curve in curves[row["variant"]]]
        all_losses = [[[loss for _, loss in curve] for curve in variant_curves] for variant_curves in curves.values()]
        intervals = [
            mean_confidence_interval(values) for values in zip(*_remove_seed_effect(losses, all_losses), strict=True)
        ]
        means = [interval.mean for interval in intervals]
        axes.plot(steps, means, line_style, color=color, label=row["variant"], linewidth=1.4)
        low, high = ([interval.mean + sign * (interval.half_width or 0) for interval in intervals] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss (nats per token)")
    axes.set_title(f"{data['name']}: {BAND_LABEL.format(len(data['seeds']))}")
    _add_grid(axes)
    axes.legend(ncols=2 if len(data["variants"]) > 6 else 1)


def _downsample_curve(curve: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """Divide a curve of (step, loss) into about CURVE_POINTS intervals, and return mean step and mean loss of each.

    The mean is NaN if a loss in the interval is missing.
    """
    points = [(step, math.nan if loss is None else loss) for step, loss in curve]
    width = max(1, len(curve) // CURVE_POINTS)
    intervals = [points[start : start + width] for start in range(0, len(curve) - width + 1, width)]
    return [
        (sum(step for step, _ in interval) / width, sum(loss for _, loss in interval) / width) for interval in intervals
    ]


def _remove_seed_effect(
    values: Sequence[Sequence[float]], all_values: Sequence[Sequence[Sequence[float]]]
) -> list[list[float]]:
    """Return `values` without the effect that a seed has on all variants, e.g. easier text (Cousineau, 2005).

    `values` is indexed by [seed][point], and `all_values` by [variant][seed][point]. If a run failed, or the variants
    have different numbers of points, the values are returned unchanged.
    """
    try:
        table = np.array(all_values, np.float64)
    except ValueError:  # the lengths differ
        return [list(run) for run in values]
    seed_means = table.mean(0)  # (seed, point)
    return (np.array(values) - seed_means + seed_means.mean(0)).tolist()


def _plot_final_losses(axes: "Axes", data: ResultsTable) -> None:
    """Plot the final loss of each seed as a dot, and the confidence interval of the mean."""
    metric = data["metric"]
    names = [row["variant"] for row in data["variants"]]
    all_values = [[[run[metric]] for run in _finished_runs(data, name)] for name in names]
    for index, (variant_values, (color, _)) in enumerate(zip(all_values, _variant_styles(data), strict=True)):
        if not variant_values:
            continue
        values = [value for [value] in _remove_seed_effect(variant_values, all_values)]
        interval = mean_confidence_interval(values)
        axes.errorbar(
            interval.mean, index, xerr=interval.half_width or 0.0, color=color, fmt="|", capsize=4, markersize=12
        )
        axes.plot(values, [index] * len(values), "o", color=color, alpha=0.45, markersize=4)
        if index == 0:
            axes.axvline(interval.mean, color=TEXT_COLOR, linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{METRICS[metric].title} on validation data, {METRICS[metric].unit}")
    axes.set_title(f"{data['name']}, at equal {data['match']}: {BAND_LABEL.format(len(data['seeds']))}")
    _add_grid(axes)


def _plot_grad_norms(axes: "Axes", data: ResultsTable) -> None:
    """Plot the gradient norm of each block relative to the last block, for initial and trained weights."""
    from matplotlib.ticker import LogLocator, NullFormatter

    colors = cycle(LINE_COLORS)
    for row in data["variants"]:
        if any("warmup" in change for change in row["changes"]):
            continue  # the initial weights do not depend on the schedule
        color = next(colors)
        for condition, line_style in (("initial", "-o"), ("trained", "--")):
            norms = [
                measurement["mean"]
                for measurement in data["measurements"]
                if (measurement["variant"], measurement["metric"]) == (row["variant"], "grad_norm")
                and measurement["condition"].startswith(condition)
            ]
            depths = [index / max(1, len(norms) - 1) for index in range(len(norms))]
            label = row["variant"] if condition == "initial" else None
            axes.plot(depths, [norm / norms[-1] for norm in norms], line_style, color=color, label=label, markersize=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("depth: 0 is the first block, 1 the last")
    axes.set_ylabel("gradient norm relative to the last block")
    axes.set_title(f"{data['name']}: initial weights (solid), trained weights (dashed)")
    _add_grid(axes)
    axes.legend()


def _add_grid(axes: "Axes") -> None:
    axes.grid(True, color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
