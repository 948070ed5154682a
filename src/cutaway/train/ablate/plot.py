"""Results as drawings: losses as they fell, and where they ended."""

import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.size.plot import INK, LINES, STYLE
from cutaway.train.ablate.metrics import METRICS
from cutaway.train.ablate.statistics import interval

if TYPE_CHECKING:  # matplotlib is loaded to draw
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":")
SMOOTH = 12
"""Points that a curve has at least; steps between them are averaged."""


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
    for row, (colour, dash) in zip(data["variants"], looks(data), strict=True):
        runs = finished(data, row["variant"])
        if not runs:
            continue
        along, bands = smoothed([run["curve"] for run in runs])
        middle = [band.mean for band in bands]
        axes.plot(along, middle, dash, color=colour, label=row["variant"], linewidth=1.4)
        low = [band.mean - (band.half or 0) for band in bands]
        high = [band.mean + (band.half or 0) for band in bands]
        axes.fill_between(along, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("loss in training, nats a token")
    axes.set_title(f"{data['name']}: {len(data['seeds'])} seeds, 95 % of the mean shaded")
    grid(axes)
    axes.legend(ncols=2 if len(data["variants"]) > 6 else 1)


def smoothed(several: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[float], list[Any]]:
    """Points in the middle of stretches of steps, and the interval over seeds of each stretch's mean."""
    count = min(len(each) for each in several)
    wide = max(1, count // (2 * SMOOTH))
    along, bands = [], []
    for begin in range(0, count - wide + 1, wide):
        part = [each[begin : begin + wide] for each in several]
        along.append(sum(step for step, _ in part[0]) / wide)
        bands.append(interval([sum(loss for _, loss in each) / wide for each in part]))
    return along, bands


def ends(axes: "Axes", data: dict[str, Any]) -> None:
    """Each seed's last loss as a dot, and the mean's interval."""
    metric = data["metric"]
    names = [row["variant"] for row in data["variants"]]
    for place, (row, (colour, _)) in enumerate(zip(data["variants"], looks(data), strict=True)):
        runs = finished(data, row["variant"])
        if not runs:
            continue
        found = row[metric]
        axes.errorbar(found["mean"], place, xerr=found["half"] or 0.0, color=colour, fmt="|", capsize=4, markersize=12)
        axes.plot([run[metric] for run in runs], [place] * len(runs), "o", color=colour, alpha=0.45, markersize=4)
    if data["variants"][0][metric] is not None:
        axes.axvline(data["variants"][0][metric]["mean"], color=INK, linewidth=0.6, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{METRICS[metric].title} on validation data, {METRICS[metric].unit}")
    axes.set_title(f"{data['name']}, at equal {data['equal']}: seeds, and 95 % of the mean")
    grid(axes)


def gradients(axes: "Axes", data: dict[str, Any]) -> None:
    """The gradient's length by block of fresh weights, each as a share of the last block's."""
    colours = cycle(LINES)
    for row in data["variants"]:
        found = [
            each for each in data["readings"]
            if each["variant"] == row["variant"] and each["metric"] == "gradient" and each["what"].startswith("fresh")
        ]  # fmt: skip
        if not found or any("warmup" in change for change in row["changed"]):
            continue  # fresh weights know of no schedule
        last = found[-1]["mean"]
        along = [place / max(1, len(found) - 1) for place in range(len(found))]
        middle = [math.exp(each["mean"] - last) for each in found]
        axes.plot(along, middle, "-o", color=next(colours), label=row["variant"], markersize=3)
    axes.set_yscale("log")
    axes.set_xlabel("depth: 0 is the first block, 1 the last")
    axes.set_ylabel("gradient's length, over the last block's")
    axes.set_title(f"{data['name']}: fresh weights")
    grid(axes)
    axes.legend()


def grid(axes: "Axes") -> None:
    axes.grid(True, color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
