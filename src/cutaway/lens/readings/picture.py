"""Readings drawn with matplotlib: ordered axes as lines, parts as bars, two axes as a heat map."""

from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import InputError
from cutaway.lens.readings.reading import shown

if TYPE_CHECKING:
    from cutaway.lens.readings.reading import Reading

ORDERED = ("layer", "token", "sublayer", "position", "other position")
"""Axes whose neighbours belong together, so that a line between them says something."""
MOST_LABELS = 72


def picture(reading: "Reading", **how: Any) -> Any:
    """A figure, closed: it is shown where it is returned and leaves nothing open."""
    from matplotlib import pyplot

    if not 1 <= len(reading.axes) <= 3:
        raise InputError(f"{len(reading.axes)} axes cannot be drawn; index the reading down to one, two or three")
    panels = reading.sheets()
    high, wide = panel_size(panels[0][1])
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    size = how.pop("figsize", (wide * across, high * down))
    figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    shared = limits(reading)
    for place, (name, part) in zip(grid.flat, panels, strict=False):
        if is_map(part):
            image = heat_map(place, part, shared | how)
        else:
            profile(place, part, how)
        if name:
            place.set_title(literal(name), fontsize=9)
    for place in grid.flat[len(panels) :]:
        place.set_visible(False)
    if is_map(panels[0][1]):
        figure.colorbar(image, ax=grid, label=literal(reading.unit), shrink=0.8)
    figure.suptitle(literal(reading.title), fontsize=10)
    pyplot.close(figure)
    return figure


def is_map(part: "Reading") -> bool:
    """Two axes, unless the second is depth: then a line for each place on the first can be followed."""
    return len(part.axes) == 2 and part.axes[1] != "layer"


def panel_size(part: "Reading") -> tuple[float, float]:
    if not is_map(part):
        return 3.5, min(max(5.0, 0.22 * part.shape[-1]), 16.0)
    column = 0.62 if part.texts is not None else 0.3
    return tuple(min(max(2.6, 1.4 + each), 12.0) for each in (0.24 * part.shape[0], column * part.shape[1]))  # type: ignore[return-value]


def limits(reading: "Reading") -> dict[str, Any]:
    """One scale for all maps: from 0, or alike on both sides of it."""
    known = np.nan_to_num(reading.values.float().cpu().numpy(), posinf=0.0, neginf=0.0)
    top = float(np.abs(known).max(initial=0.0)) or 1.0
    if (known < 0).any():
        return {"cmap": "RdBu", "vmin": -top, "vmax": top}
    return {"cmap": "viridis", "vmin": 0.0, "vmax": top}


def heat_map(place: Any, part: "Reading", how: dict[str, Any]) -> Any:
    values = part.values.float().cpu().numpy()
    image = place.imshow(values, aspect="auto", interpolation="nearest", **how)
    if part.texts is not None and values.size <= 1200:
        middle = (how["vmax"] + how["vmin"]) / 2
        for (row, column), text in np.ndenumerate(part.texts):
            colour = "black" if how["cmap"] == "RdBu" or values[row, column] > middle else "white"
            place.text(column, row, clipped(text), ha="center", va="center", fontsize=6, color=colour)
    named(place.yaxis, part.axes[0], part.labels[0])
    named(place.xaxis, part.axes[1], part.labels[1])
    return image


def profile(place: Any, part: "Reading", how: dict[str, Any]) -> None:
    values = part.values.float().cpu().numpy()
    values = np.where(np.isfinite(values), values, np.nan)  # no line goes there
    spots = np.arange(values.shape[-1])
    if len(part.axes) == 2:
        for name, row in zip(part.labels[0], values, strict=True):
            place.plot(spots, row, marker="o", markersize=3, label=literal(shown(name)), **how)
        place.legend(fontsize=8)
    elif part.axes[0] in ORDERED:
        place.plot(spots, values, marker="o", markersize=3, **how)
    else:
        place.bar(spots, values, color=["#c8504a" if value < 0 else "#4678c8" for value in values], **how)
    place.axhline(0, color="grey", linewidth=0.5)
    place.set_ylabel(literal(part.unit))
    named(place.xaxis, part.axes[-1], part.labels[-1])


def named(axis: Any, name: str, labels: tuple[str, ...]) -> None:
    """Ticks with labels, so few that they can be read."""
    step = -(-len(labels) // MOST_LABELS)
    spots = list(range(0, len(labels), step))
    long = axis.axis_name == "x" and max((len(label) for label in labels), default=0) > 2
    axis.set_ticks(spots, [clipped(labels[at]) for at in spots], fontsize=7, rotation=90 if long else 0)
    axis.set_label_text(name)


def clipped(text: str) -> str:
    """Short, and of signs that can be seen."""
    text = shown(text)
    return literal(text if len(text) <= 14 else f"{text[:13]}…")


def literal(text: str) -> str:
    """Without the sign that starts a formula in matplotlib."""
    return text.replace("$", r"\$")
