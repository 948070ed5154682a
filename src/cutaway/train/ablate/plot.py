"""Results as drawings: losses as they fell, and where they ended."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cutaway.size.plot import INK, LINES, STYLE
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.statistics import interval

if TYPE_CHECKING:  # matplotlib is loaded to draw
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":")
POINTS = 24
"""Of a curve, about; steps between them are averaged."""
SHADED = "{} seeds set level, 95 % of the mean"


def draw(data: dict[str, Any], out: Path) -> list[Path]:
    """curves.svg and losses.svg, and gradients.svg where they were measured."""
    wide = 0.36 * len(data["variants"]) + 1.4
    drawn = [figure(out / "curves.svg", (7.5, 4.2), lambda axes: curves(axes, data))]
    drawn.append(figure(out / "losses.svg", (7.5, wide), lambda axes: ends(axes, data)))
    if any(row["metric"] == "gradient" for row in data["readings"]):
        drawn.append(figure(out / "gradients.svg", (7.5, 4.2), lambda axes: gradients(axes, data)))
    return drawn


def figure(path: Path, size: tuple[float, float], paint: Any) -> Path:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        sheet = Figure(figsize=size, layout="constrained")
        paint(sheet.subplots())
        sheet.savefig(path, metadata={"Date": None})
    return path


def looks(data: dict[str, Any]) -> list[tuple[str, str]]:
    """A colour and a dash for each variant."""
    count = len(data["variants"])
    return [(LINES[place % len(LINES)], DASHES[place // len(LINES) % len(DASHES)]) for place in range(count)]


def finished(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in data["runs"] if run["variant"] == name and "failed" not in run]


def curves(axes: "Axes", data: dict[str, Any]) -> None:
    """Training loss, averaged over a few steps and over seeds; the band is the mean's interval."""
    several = {row["variant"]: finished(data, row["variant"]) for row in data["variants"]}
    stretches = {name: [stretched(run["curve"]) for run in runs] for name, runs in several.items()}
    for row, (colour, dash) in zip(data["variants"], looks(data), strict=True):
        if not several[row["variant"]]:
            continue
        along = [step for step, _ in stretches[row["variant"]][0]]
        own = [[loss for _, loss in each] for each in stretches[row["variant"]]]
        others = [[[loss for _, loss in each] for each in runs] for runs in stretches.values()]
        bands = [interval(values) for values in zip(*levelled(own, others), strict=True)]
        axes.plot(along, [band.mean for band in bands], dash, color=colour, label=row["variant"], linewidth=1.4)
        low, high = ([band.mean + side * (band.half or 0) for band in bands] for side in (-1, 1))
        axes.fill_between(along, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss in training, nats a token")
    axes.set_title(f"{data['name']}: {SHADED.format(len(data['seeds']))}")
    grid(axes)
    axes.legend(ncols=2 if len(data["variants"]) > 6 else 1)


def stretched(curve: Sequence[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """A curve of fewer points: the middle of each stretch of steps, and the mean there; none where there is no loss."""
    known = [(step, math.nan if loss is None else loss) for step, loss in curve]
    wide = max(1, len(curve) // POINTS)
    parts = [known[begin : begin + wide] for begin in range(0, len(curve) - wide + 1, wide)]
    return [(sum(step for step, _ in part) / wide, sum(loss for _, loss in part) / wide) for part in parts]


def levelled(own: Sequence[Sequence[float]], everyone: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Each seed's values without what that seed did to all variants alike, such as easier text (Cousineau, 2005).

    Where some run came to no end, or variants have other numbers of steps, seeds cannot be set level: as they are.
    """
    shapes = {(len(runs), len(run)) for runs in everyone for run in runs} | {(len(runs), 0) for runs in everyone}
    if len({seeds for seeds, _ in shapes}) > 1 or len({points for _, points in shapes if points}) > 1:
        return [list(run) for run in own]
    seeds, points = len(own), len(own[0])
    here = [[fmean(runs[seed][point] for runs in everyone) for point in range(points)] for seed in range(seeds)]
    whole = [fmean(each[point] for each in here) for point in range(points)]
    return [[own[seed][i] - here[seed][i] + whole[i] for i in range(points)] for seed in range(seeds)]


def ends(axes: "Axes", data: dict[str, Any]) -> None:
    """Each seed's last loss as a dot, and the mean's interval."""
    metric = data["metric"]
    names = [row["variant"] for row in data["variants"]]
    everyone = [[[run[metric]] for run in finished(data, name)] for name in names]
    for place, (own, (colour, _)) in enumerate(zip(everyone, looks(data), strict=True)):
        if not own:
            continue
        values = [value for [value] in levelled(own, everyone)]
        found = interval(values)
        axes.errorbar(found.mean, place, xerr=found.half or 0.0, color=colour, fmt="|", capsize=4, markersize=12)
        axes.plot(values, [place] * len(values), "o", color=colour, alpha=0.45, markersize=4)
        if place == 0:
            axes.axvline(found.mean, color=INK, linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{METRICS[metric].title} on validation data, {METRICS[metric].unit}")
    axes.set_title(f"{data['name']}, at equal {data['equal']}: {SHADED.format(len(data['seeds']))}")
    grid(axes)


def gradients(axes: "Axes", data: dict[str, Any]) -> None:
    """The gradient's length by block, each as a share of the last block's: fresh weights, and dashed when trained."""
    from matplotlib.ticker import LogLocator, NullFormatter

    colours = cycle(LINES)
    for row in data["variants"]:
        if any("warmup" in change for change in row["changed"]):
            continue  # fresh weights know of no schedule
        colour = next(colours)
        for when, dash in (("fresh", "-o"), ("trained", "--")):
            found = [
                each["mean"]
                for each in data["readings"]
                if (each["variant"], each["metric"]) == (row["variant"], "gradient") and each["what"].startswith(when)
            ]
            along = [place / max(1, len(found) - 1) for place in range(len(found))]
            label = row["variant"] if when == "fresh" else None
            shares = [each / found[-1] for each in found]
            axes.plot(along, shares, dash, color=colour, label=label, markersize=3)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("depth: 0 is the first block, 1 the last")
    axes.set_ylabel("gradient's length, over the last block's")
    axes.set_title(f"{data['name']}: fresh weights, and dashed when trained")
    grid(axes)
    axes.legend()


def grid(axes: "Axes") -> None:
    axes.grid(True, color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
