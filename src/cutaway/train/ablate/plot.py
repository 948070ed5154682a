"""Results as drawings: losses as they fell, and where they ended."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cutaway.size.plot import LINE_COLORS, MATPLOTLIB_STYLE, TEXT_COLOR
from cutaway.train.ablate.confidence_interval import mean_confidence_interval
from cutaway.train.ablate.metrics import METRICS

if TYPE_CHECKING:  # matplotlib is loaded to draw
    from matplotlib.axes import Axes

LINE_STYLES = ("-", "--", ":")
CURVE_POINTS = 24
"""Of a curve, about; steps between them are averaged."""
BAND_LABEL = "{} seeds set level, 95 % of the mean"


def plot_results(data: dict[str, Any], output_dir: Path) -> list[Path]:
    """curves.svg and losses.svg, and gradients.svg where they were measured."""
    wide = 0.36 * len(data["variants"]) + 1.4
    drawn = [_save_figure(output_dir / "curves.svg", (7.5, 4.2), lambda axes: _plot_loss_curves(axes, data))]
    drawn.append(_save_figure(output_dir / "losses.svg", (7.5, wide), lambda axes: _plot_final_losses(axes, data)))
    if any(row["metric"] == "grad_norm" for row in data["measurements"]):
        drawn.append(_save_figure(output_dir / "gradients.svg", (7.5, 4.2), lambda axes: _plot_grad_norms(axes, data)))
    return drawn


def _save_figure(path: Path, size: tuple[float, float], draw: Any) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(MATPLOTLIB_STYLE):
        sheet = Figure(figsize=size, layout="constrained")
        draw(sheet.subplots())
        sheet.savefig(path, metadata={"Date": None})
    return path


def _variant_styles(data: dict[str, Any]) -> list[tuple[str, str]]:
    """A color and a dash for each variant."""
    count = len(data["variants"])
    return [
        (LINE_COLORS[place % len(LINE_COLORS)], LINE_STYLES[place // len(LINE_COLORS) % len(LINE_STYLES)])
        for place in range(count)
    ]


def _finished_runs(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in data["runs"] if run["variant"] == name and "failed" not in run]


def _plot_loss_curves(axes: "Axes", data: dict[str, Any]) -> None:
    """Training loss, averaged over a few steps and over seeds; the band is the mean's interval."""
    several = {row["variant"]: _finished_runs(data, row["variant"]) for row in data["variants"]}
    stretches = {name: [_downsample_curve(run["curve"]) for run in runs] for name, runs in several.items()}
    for row, (color, dash) in zip(data["variants"], _variant_styles(data), strict=True):
        if not several[row["variant"]]:
            continue
        along = [step for step, _ in stretches[row["variant"]][0]]
        own = [[loss for _, loss in each] for each in stretches[row["variant"]]]
        others = [[[loss for _, loss in each] for each in runs] for runs in stretches.values()]
        bands = [mean_confidence_interval(values) for values in zip(*_remove_seed_effect(own, others), strict=True)]
        axes.plot(along, [band.mean for band in bands], dash, color=color, label=row["variant"], linewidth=1.4)
        low, high = ([band.mean + side * (band.half_width or 0) for band in bands] for side in (-1, 1))
        axes.fill_between(along, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss in training, nats a token")
    axes.set_title(f"{data['name']}: {BAND_LABEL.format(len(data['seeds']))}")
    _add_grid(axes)
    axes.legend(ncols=2 if len(data["variants"]) > 6 else 1)


def _downsample_curve(curve: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """A curve of fewer points: the middle of each stretch of steps, and the mean there; none where there is no loss."""
    known = [(step, math.nan if loss is None else loss) for step, loss in curve]
    wide = max(1, len(curve) // CURVE_POINTS)
    parts = [known[begin : begin + wide] for begin in range(0, len(curve) - wide + 1, wide)]
    return [(sum(step for step, _ in part) / wide, sum(loss for _, loss in part) / wide) for part in parts]


def _remove_seed_effect(
    values: Sequence[Sequence[float]], all_values: Sequence[Sequence[Sequence[float]]]
) -> list[list[float]]:
    """Each seed's values without what that seed did to all variants alike, such as easier text (Cousineau, 2005).

    Where some run came to no end, or variants have other numbers of steps, seeds cannot be set level: as they are.
    """
    shapes = {(len(runs), len(run)) for runs in all_values for run in runs} | {(len(runs), 0) for runs in all_values}
    if len({seeds for seeds, _ in shapes}) > 1 or len({points for _, points in shapes if points}) > 1:
        return [list(run) for run in values]
    seeds, points = len(values), len(values[0])
    here = [[fmean(runs[seed][point] for runs in all_values) for point in range(points)] for seed in range(seeds)]
    whole = [fmean(each[point] for each in here) for point in range(points)]
    return [[values[seed][i] - here[seed][i] + whole[i] for i in range(points)] for seed in range(seeds)]


def _plot_final_losses(axes: "Axes", data: dict[str, Any]) -> None:
    """Each seed's last loss as a dot, and the mean's interval."""
    metric = data["metric"]
    names = [row["variant"] for row in data["variants"]]
    everyone = [[[run[metric]] for run in _finished_runs(data, name)] for name in names]
    for place, (own, (color, _)) in enumerate(zip(everyone, _variant_styles(data), strict=True)):
        if not own:
            continue
        values = [value for [value] in _remove_seed_effect(own, everyone)]
        found = mean_confidence_interval(values)
        axes.errorbar(found.mean, place, xerr=found.half_width or 0.0, color=color, fmt="|", capsize=4, markersize=12)
        axes.plot(values, [place] * len(values), "o", color=color, alpha=0.45, markersize=4)
        if place == 0:
            axes.axvline(found.mean, color=TEXT_COLOR, linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{METRICS[metric].title} on validation data, {METRICS[metric].unit}")
    axes.set_title(f"{data['name']}, at equal {data['match']}: {BAND_LABEL.format(len(data['seeds']))}")
    _add_grid(axes)


def _plot_grad_norms(axes: "Axes", data: dict[str, Any]) -> None:
    """The gradient's length by block, each as a share of the last block's: fresh weights, and dashed when trained."""
    from matplotlib.ticker import LogLocator, NullFormatter

    colors = cycle(LINE_COLORS)
    for row in data["variants"]:
        if any("warmup" in change for change in row["changes"]):
            continue  # initial weights know of no schedule
        color = next(colors)
        for when, dash in (("initial", "-o"), ("trained", "--")):
            found = [
                each["mean"]
                for each in data["measurements"]
                if (each["variant"], each["metric"]) == (row["variant"], "grad_norm")
                and each["condition"].startswith(when)
            ]
            along = [place / max(1, len(found) - 1) for place in range(len(found))]
            label = row["variant"] if when == "initial" else None
            shares = [each / found[-1] for each in found]
            axes.plot(along, shares, dash, color=color, label=label, markersize=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("depth: 0 is the first block, 1 the last")
    axes.set_ylabel("gradient's length, over the last block's")
    axes.set_title(f"{data['name']}: fresh weights, and dashed when trained")
    _add_grid(axes)
    axes.legend()


def _add_grid(axes: "Axes") -> None:
    axes.grid(True, color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
