"""Plot of training and validation loss, or reward, and of the learning rate, from the metrics log of a run."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE, TEXT_COLOR
from cutaway.train.logging.metrics_log import Metrics

if TYPE_CHECKING:  # matplotlib is imported only to draw
    from matplotlib.axes import Axes

MAX_POINTS = 800
"""Maximum number of points of a line. In runs with more steps, a point is the mean of several steps."""
LOG_AXIS_MIN_STEPS = 1000
"""Number of steps above which the step axis is logarithmic."""
SMOOTHING_SHARE = 0.1
"""Averaging window of the smoothed line, as a fraction of the number of steps so far."""


def plot_losses(rows: Iterable[Metrics], path: Path, title: str = "") -> Path:
    """Plot training loss, validation loss and learning rate by step. An existing file is replaced atomically.

    If the log has rewards, they are plotted instead of the loss, which is near 0 in reinforcement learning.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = list(rows)
    quantity = "reward" if any("reward" in row for row in rows) else "loss"
    train_rows, eval_rows = [], []
    for row in rows:
        if row.get(quantity) is not None:
            train_rows.append((row["step"], row[quantity], row["lr"]))
        if row.get(f"eval_{quantity}") is not None:
            eval_rows.append((row["step"], row[f"eval_{quantity}"]))
    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=(8, 4.2))  # fixed margins: a layout engine would be slow
        axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.91, "top": 0.93, "bottom": 0.12})
        if train_rows:
            steps, losses, lrs = zip(*train_rows, strict=True)
            groups = group_steps(steps)
            x = _group_means(steps, groups)
            _shade_lr(axes, x, _group_means(lrs, groups))
            axes.plot(x, _group_means(losses, groups), color=LINE_COLORS[0], alpha=0.3, linewidth=0.8, label="training")
            low, high = ([reduce(losses[group]) for group in groups] for reduce in (min, max))
            axes.fill_between(x, low, high, color=LINE_COLORS[0], alpha=0.15, linewidth=0)
            smoothed = _group_means(_smooth(losses), groups)
            axes.plot(x, smoothed, color=LINE_COLORS[0], linewidth=1.6, label="training, smoothed")
        if eval_rows:
            eval_steps, eval_losses = zip(*eval_rows, strict=True)
            color, last = LINE_COLORS[1], (eval_steps[-1], eval_losses[-1])
            axes.plot(eval_steps, eval_losses, "o-", color=color, markersize=3.5, linewidth=1, label="validation")
            axes.annotate(f" {last[1]:.4g}", last, color=color, va="center", annotation_clip=False)
        _style_axes(axes, title, quantity)
        temporary = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            figure.savefig(temporary, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def group_steps(steps: Sequence[float]) -> list[slice]:
    """Divide the list of steps into groups (slices), one for each point of a line in the plot.

    In short runs each group is one step. In long runs the size of the groups grows geometrically with the step.
    """
    if len(steps) <= MAX_POINTS:
        return [slice(index, index + 1) for index in range(len(steps))]
    growth = len(steps) ** (1 / MAX_POINTS)
    edges = [0]
    while edges[-1] < len(steps):
        edges.append(max(edges[-1] + 1, min(len(steps), round(edges[-1] * growth))))
    return [slice(low, high) for low, high in pairwise(edges)]


def _group_means(values: Sequence[float], groups: Sequence[slice]) -> list[float]:
    return [sum(values[group]) / len(values[group]) for group in groups]


def _smooth(values: Sequence[float]) -> list[float]:
    """Moving average whose window grows with the step, so that the window has constant width on a logarithmic axis."""
    mean, smoothed = 0.0, []
    for count, value in enumerate(values, 1):
        mean += min(1.0, 1 / (SMOOTHING_SHARE * count)) * (value - mean)
        smoothed.append(mean)
    return smoothed


def _shade_lr(axes: "Axes", steps: Sequence[float], lr: Sequence[float]) -> None:
    """Draw the learning rate as a shaded area in the background, with an axis from 0 to its maximum."""
    lr_axes = axes.twinx()
    lr_axes.fill_between(steps, lr, color="#EEEEEE", linewidth=0)
    lr_axes.set_ylim(0, 1.15 * max(lr))
    lr_axes.set_yticks([0, max(lr)], ["0", "max"], color="#999999", fontsize=8)
    lr_axes.set_ylabel("learning rate", color="#999999", fontsize=8)
    lr_axes.tick_params(length=0)
    lr_axes.spines[:].set_visible(False)
    lr_axes.set_zorder(0)
    axes.set_zorder(1)
    axes.patch.set_visible(False)


def _style_axes(axes: "Axes", title: str, quantity: str) -> None:
    """Set axes, title and legend. The axis of positive losses is logarithmic, because ratios of losses matter."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

    is_logarithmic = quantity == "loss" and axes.dataLim.y0 > 0
    if is_logarithmic:
        axes.set_yscale("log")
    low, high = axes.get_ylim()
    spans_decade = is_logarithmic and high > 10 * low
    locator = LogLocator(subs=(1, 2, 5)) if spans_decade else MaxNLocator(6)
    ticks = [tick for tick in locator.tick_values(low, high) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:,.4g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    if axes.dataLim.x1 > LOG_AXIS_MIN_STEPS:
        axes.set_xscale("log")
        axes.set_xlim(left=1)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)" if quantity == "loss" else "mean reward")
    axes.set_title(title, color=TEXT_COLOR)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
