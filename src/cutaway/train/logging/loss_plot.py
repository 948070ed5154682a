"""The losses of a run as a drawing, from its log."""

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE, TEXT_COLOR

if TYPE_CHECKING:  # matplotlib is loaded to draw
    from matplotlib.axes import Axes

MAX_POINTS = 800
"""Of a line that is drawn, at most; of a longer run each is the mean of some steps."""
LOG_AXIS_MIN_STEPS = 1000
"""Steps from which on each tenfold of them is as wide as the one before."""
SMOOTHING_SHARE = 0.1
"""The share of all steps so far over which the smooth line is averaged."""


def plot_losses(rows: Iterable[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Training and validation loss and the learning rate, by step; the file is replaced as a whole."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps, looks = [], []
    for row in rows:
        if row.get("loss") is not None:
            steps.append((row["step"], row["loss"], row["lr"]))
        if row.get("eval_loss") is not None:
            looks.append((row["step"], row["eval_loss"]))
    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=(8, 4.2))  # with fixed margins, which take no time to find
        axes = figure.subplots(gridspec_kw={"left": 0.08, "right": 0.91, "top": 0.93, "bottom": 0.12})
        if steps:
            number, loss, lr = zip(*steps, strict=True)
            groups = group_steps(number)
            along = _group_means(number, groups)
            _shade_lr(axes, along, _group_means(lr, groups))
            axes.plot(
                along, _group_means(loss, groups), color=LINE_COLORS[0], alpha=0.3, linewidth=0.8, label="training"
            )
            low, high = ([each(loss[group]) for group in groups] for each in (min, max))
            axes.fill_between(along, low, high, color=LINE_COLORS[0], alpha=0.15, linewidth=0)
            smooth = _group_means(_smooth(loss), groups)
            axes.plot(along, smooth, color=LINE_COLORS[0], linewidth=1.6, label="training, smooth")
        if looks:
            at, held = zip(*looks, strict=True)
            axes.plot(at, held, "o-", color=LINE_COLORS[1], markersize=3.5, linewidth=1, label="validation")
            axes.annotate(
                f" {held[-1]:.3f}", (at[-1], held[-1]), color=LINE_COLORS[1], va="center", annotation_clip=False
            )
        _style_axes(axes, title)
        draft = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            figure.savefig(draft, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


def group_steps(steps: Sequence[float]) -> list[slice]:
    """Steps that are drawn as one point: single ones, or more and more where the axis is narrow and steps are many."""
    if len(steps) <= MAX_POINTS:
        return [slice(place, place + 1) for place in range(len(steps))]
    growth = len(steps) ** (1 / MAX_POINTS)
    edges = [0]
    while edges[-1] < len(steps):
        edges.append(max(edges[-1] + 1, min(len(steps), round(edges[-1] * growth))))
    return [slice(low, high) for low, high in pairwise(edges)]


def _group_means(values: Sequence[float], groups: Sequence[slice]) -> list[float]:
    return [sum(values[group]) / len(values[group]) for group in groups]


def _smooth(values: Sequence[float]) -> list[float]:
    """An average that leans on what was last, the longer the later: on an axis of tenfolds, as wide everywhere."""
    mean, line = 0.0, []
    for count, value in enumerate(values, 1):
        mean += min(1.0, 1 / (SMOOTHING_SHARE * count)) * (value - mean)
        line.append(mean)
    return line


def _shade_lr(axes: "Axes", steps: Sequence[float], lr: Sequence[float]) -> None:
    """The learning rate as a shade behind, from 0 to what it is at most."""
    beside: Any = axes.twinx()
    beside.fill_between(steps, lr, color="#EEEEEE", linewidth=0)
    beside.set_ylim(0, 1.15 * max(lr))
    beside.set_yticks([0, max(lr)], ["0", "full"], color="#999999", fontsize=8)
    beside.set_ylabel("learning rate", color="#999999", fontsize=8)
    beside.tick_params(length=0)
    beside.spines[:].set_visible(False)
    beside.set_zorder(0)
    axes.set_zorder(1)
    axes.patch.set_visible(False)


def _style_axes(axes: "Axes", title: str) -> None:
    """Losses go by ratios, so their axis is logarithmic; its ticks are plain numbers."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    wide = high > 10 * low
    found = LogLocator(subs=(1, 2, 5)).tick_values(low, high) if wide else MaxNLocator(6).tick_values(low, high)
    ticks = [tick for tick in found if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:,.4g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    if axes.dataLim.x1 > LOG_AXIS_MIN_STEPS:
        axes.set_xscale("log")
        axes.set_xlim(left=1)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title, color=TEXT_COLOR)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
