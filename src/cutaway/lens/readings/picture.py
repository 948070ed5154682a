"""Readings drawn with matplotlib: ordered axes as lines, parts as bars, two axes as a heat map."""

import math
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import InputError
from cutaway.lens.readings.reading import shown

if TYPE_CHECKING:
    from cutaway.lens.readings.reading import Reading

ORDERED = ("layer", "sublayer", "position", "other position")
"""Axes whose neighbours belong together, so that a line between them says something."""
ABOVE, BELOW = "#4678c8", "#c8504a"
"""Blue above 0 and red below, as in tables."""
MOST_LABELS = 72
MOST_WRITTEN = 120
"""Cells of a map that have their numbers written on them, and not so many bars."""
NOISE = 1e-4
"""Of the largest value: what is so little below 0 is 0, rounded."""
LONG_NAMES = 12
"""Letters; bars with longer names lie, so that the names can stand beside them."""
LETTER = 0.06
"""Inches, of a label."""
STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "text.parse_math": False,  # a token may have a dollar in it
}


def picture(reading: "Reading", **how: Any) -> Any:
    """A figure, closed: it is shown where it is returned and leaves nothing open."""
    from matplotlib import pyplot

    if not 1 <= len(reading.axes) <= 3:
        raise InputError(f"{len(reading.axes)} axes cannot be drawn; index the reading down to one, two or three")
    panels = reading.sheets()
    title, note = wrapped(reading.title, 50), wrapped(reading.note, 60)
    high, wide = panel_size(panels[0][1])
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    size = how.pop("figsize", (wide * across, high * down + 0.17 * (title + note).count("\n")))
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        shared = limits(reading)
        for place, (name, part) in zip(grid.flat, panels, strict=False):
            if is_map(part):
                image = heat_map(place, part, shared | how)
            else:
                profile(place, part, how)
            if name:
                place.set_title(name, fontsize=9)
        for place in grid.flat[len(panels) :]:
            place.set_visible(False)
        if is_map(panels[0][1]):
            figure.colorbar(image, ax=grid, label=reading.unit, shrink=0.8).outline.set_visible(False)
        figure.suptitle(wrapped(reading.title, size[0] * 13), fontsize=10)
        figure.supxlabel(wrapped(reading.note, size[0] * 17), fontsize=7, color="#555555")
    pyplot.close(figure)
    return figure


def wrapped(text: str, letters: float) -> str:
    return fill(text, max(int(letters), 20))


def is_map(part: "Reading") -> bool:
    """Two axes, unless the second is depth: then a line for each place on the first can be followed."""
    return len(part.axes) == 2 and part.axes[1] != "layer"


def lies(part: "Reading") -> bool:
    """Whether its bars lie."""
    return len(part.axes) == 1 and part.axes[0] not in ORDERED and max(map(len, part.labels[0])) > LONG_NAMES


def panel_size(part: "Reading") -> tuple[float, float]:
    """Inches, high and wide."""
    if lies(part):
        return min(max(1.6, 1.1 + 0.2 * part.shape[0]), 12.0), 6.5
    if not is_map(part):
        return 3.2, min(max(5.0, 0.22 * part.shape[-1]), 16.0)
    column = 0.62 if part.texts is not None else 0.42 if part.values.numel() <= MOST_WRITTEN else 0.3
    names = 0.07 * max(map(len, part.labels[0]))
    return min(max(2.4, 1.4 + 0.25 * part.shape[0]), 12.0), min(max(2.8, 1.6 + names + column * part.shape[1]), 12.0)


def limits(reading: "Reading") -> dict[str, Any]:
    """One scale for all maps: from 0, or alike on both sides of it."""
    known = np.nan_to_num(reading.values.float().cpu().numpy(), posinf=0.0, neginf=0.0)
    top = float(np.abs(known).max(initial=0.0)) or 1.0
    if (known < -NOISE * top).any():
        return {"cmap": "RdBu", "vmin": -top, "vmax": top}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": top}


def heat_map(place: Any, part: "Reading", how: dict[str, Any]) -> Any:
    values = part.values.float().cpu().numpy()
    image = place.imshow(values, aspect="auto", interpolation="nearest", **how)
    place.spines[:].set_visible(False)
    written = None
    if part.texts is not None and values.size <= 1200:
        written = np.vectorize(lambda text: clipped(text, 10), otypes=[object])(part.texts)
    elif part.texts is None and values.size <= MOST_WRITTEN:
        written = np.vectorize(lambda value: number(value, part), otypes=[object])(values)
    for (row, column), text in np.ndenumerate(written if written is not None else np.empty((0, 0))):
        if text:
            colour = "white" if is_dark(image, float(values[row, column])) else "black"
            place.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
    named(place.yaxis, part.axes[0], part.labels[0])
    named(place.xaxis, part.axes[1], part.labels[1])
    return image


def is_dark(image: Any, value: float) -> bool:
    """Whether black on this value's colour would be hard to read."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.5


def profile(place: Any, part: "Reading", how: dict[str, Any]) -> None:
    values = part.values.float().cpu().numpy()
    values = np.where(np.isfinite(values), values, np.nan)  # no line goes there
    spots = np.arange(values.shape[-1])
    if lies(part):
        lying(place, part, values, how)
        return
    if len(part.axes) == 2:
        for name, row in zip(part.labels[0], values, strict=True):
            place.plot(spots, row, marker="o", markersize=3, label=shown(name), **how)
        place.legend(fontsize=8, frameon=False)
    elif part.axes[0] in ORDERED:
        place.plot(spots, values, marker="o", markersize=3, **{"color": ABOVE} | how)
    else:
        place.bar(spots, values, **{"color": [BELOW if value < 0 else ABOVE for value in values]} | how)
    place.axhline(0, color="grey", linewidth=0.5)
    place.set_ylabel(part.unit)
    named(place.xaxis, part.axes[-1], part.labels[-1])


def lying(place: Any, part: "Reading", values: Any, how: dict[str, Any]) -> None:
    """Bars from the top down, each with its number."""
    bars = place.barh(
        np.arange(len(values)), values, **{"color": [BELOW if value < 0 else ABOVE for value in values]} | how
    )
    if len(values) <= MOST_WRITTEN:
        place.bar_label(bars, [number(value, part) for value in values], padding=2, fontsize=7)
        place.margins(x=0.1)
    place.margins(y=0.02)
    place.invert_yaxis()
    place.axvline(0, color="grey", linewidth=0.5)
    place.set_xlabel(part.unit)
    named(place.yaxis, part.axes[0], part.labels[0])


def number(value: float, part: "Reading") -> str:
    """As many places as the largest value leaves room for."""
    if math.isnan(value):
        return ""
    top = float(part.values.abs().nan_to_num(0.0, posinf=0.0).max())
    places = 2 - math.floor(math.log10(top)) if top else 0
    told = f"{value:.{min(max(places if top >= 1 else places - 1, 0), 6)}f}".replace("-", "−")
    return "0" if not told.strip("−0.") else told


def named(axis: Any, name: str, labels: tuple[str, ...]) -> None:
    """Ticks with labels, so few that they can be read."""
    step = -(-len(labels) // MOST_LABELS)
    spots = list(range(0, len(labels), step))
    words = [clipped(labels[at], 40) for at in spots]
    room = axis.get_figure().get_figwidth() / axis.axes.get_gridspec().ncols - 1.6  # inches, beside numbers and scale
    long = axis.axis_name == "x" and LETTER * max(map(len, words), default=0) > room / max(len(words), 1)
    axis.set_ticks(spots, words, fontsize=7, rotation=90 if long else 0)
    axis.set_tick_params(length=2, color="grey")
    axis.set_label_text(name)


def clipped(text: str, most: int) -> str:
    text = shown(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
