"""A labeled tensor: numbers with names on every axis, that print, draw and index themselves."""

import math
from dataclasses import dataclass, replace
from html import escape
from textwrap import fill
from typing import Any

import numpy as np
from torch import Tensor

from cutaway.errors import InputError

LabelIndex = str | int | slice | list[str] | list[int]
"""Of an axis: one by its label or number, several, or a range. One alone takes the axis away."""
MAX_TABLE_ROWS, MAX_TABLE_COLUMNS = 64, 24
ORDERED_AXES = ("layer", "sublayer", "position", "other position")
"""Axes whose neighbours belong together, so that a line between them says something."""
POSITIVE_COLOR, NEGATIVE_COLOR = "#4678c8", "#c8504a"
"""Blue above 0 and red below, as in tables."""
MAX_TICK_LABELS = 72
MAX_ANNOTATED_CELLS = 120
"""Cells of a map that have their numbers written on them, and not so many bars."""
SIGN_TOLERANCE = 1e-4
"""Of the largest value: what is so little below 0 is 0, rounded."""
LONG_LABEL_CHARS = 12
"""Letters; bars with longer names lie, so that the names can stand beside them."""
CHAR_WIDTH_INCHES = 0.06
"""Inches, of a label."""
PLOT_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 8,
    "text.parse_math": False,  # a token may have a dollar in it
}


@dataclass(frozen=True, eq=False, repr=False)
class LabeledTensor:
    """A labelled array, with what it is a picture of."""

    title: str
    values: Tensor
    axes: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    """A label for each place on each axis; two tokens may have the same."""
    unit: str = ""
    note: str = ""
    """What one should know to read it."""
    annotations: Any = None
    """What to write on each value: a numpy array of texts of the same shape, or None."""

    def __post_init__(self) -> None:
        assert tuple(self.values.shape) == tuple(map(len, self.labels)), (self.values.shape, self.labels)
        assert len(set(self.axes)) == len(self.labels)
        assert self.annotations is None or self.annotations.shape == tuple(self.values.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __float__(self) -> float:
        if self.values.numel() != 1:
            raise InputError(f"{self.title} has {self.values.numel()} values; index it down to one")
        return float(self.values)

    def __getitem__(self, key: LabelIndex | tuple[LabelIndex, ...]) -> "LabeledTensor":
        """By labels or numbers, axis after axis: r["3", :, "induction"]."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.axes):
            raise InputError(f"{len(keys)} places were given, and this tensor has the axes {', '.join(self.axes)}")
        return self.select(**dict(zip(self.axes, keys, strict=False)))

    def select(self, **selection: LabelIndex) -> "LabeledTensor":
        """By the names of axes: r.select(head_type="induction", layer=3)."""
        values, texts, axes, labels = self.values, self.annotations, list(self.axes), list(self.labels)
        title = self.title
        for axis, place in selection.items():
            if axis not in self.axes:
                raise InputError(f"this tensor has no axis '{axis}'; it has {', '.join(self.axes)}")
            where = axes.index(axis)
            found = self._find_indices(axis, place)
            kept = (slice(None),) * where + (found,)
            values, texts = values[kept], None if texts is None else texts[kept]
            if isinstance(found, int):
                axes.pop(where)
                title = f"{title}, {axis} {show_whitespace(labels.pop(where)[found])}"
            else:
                labels[where] = tuple(labels[where][number] for number in found)
        texts = np.array(texts, dtype=object) if texts is not None else None
        return replace(self, title=title, values=values, annotations=texts, axes=tuple(axes), labels=tuple(labels))

    def _find_indices(self, axis: str, key: Any) -> int | list[int]:
        """The numbers of the places meant on an axis."""
        labels = self.labels[self.axes.index(axis)]
        if isinstance(key, slice | list | tuple):
            found = (
                list(range(len(labels)))[key] if isinstance(key, slice) else [self._find_index(axis, p) for p in key]
            )
            if not found:
                raise InputError(f"{key} leaves nothing of the axis {axis}, which has {len(labels)} places")
            return found
        return self._find_index(axis, key)

    def _find_index(self, axis: str, key: Any) -> int:
        labels = self.labels[self.axes.index(axis)]
        if isinstance(key, str):
            numbers = [number for number, label in enumerate(labels) if label == key]
            if len(numbers) != 1:
                why = "is not on" if not numbers else f"stands {len(numbers)} times on"
                known = ", ".join(map(show_whitespace, labels[:8])) + (" …" if len(labels) > 8 else "")
                raise InputError(f"'{show_whitespace(key)}' {why} the axis {axis} ({known}); give its number, from 0")
            return numbers[0]
        if not isinstance(key, int) or isinstance(key, bool) or not -len(labels) <= key < len(labels):
            raise InputError(f"the axis {axis} has {len(labels)} places, and {key!r} is none of them")
        return key % len(labels)

    def sum(self, axis: str) -> "LabeledTensor":
        """Added up along an axis."""
        if axis not in self.axes:
            raise InputError(f"this tensor has no axis '{axis}'; it has {', '.join(self.axes)}")
        where = self.axes.index(axis)
        axes, labels = list(self.axes), list(self.labels)
        del axes[where], labels[where]
        return replace(self, values=self.values.nansum(where), axes=tuple(axes), labels=tuple(labels), annotations=None)

    def top(self, count: int = 10) -> list[tuple[tuple[str, ...], float]]:
        """The values furthest from 0, with their labels."""
        flat = self.values.flatten()
        order = flat.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[:count].tolist()
        places = [np.unravel_index(number, self.shape) for number in order if not math.isnan(flat[number])]
        return [
            (tuple(names[at] for names, at in zip(self.labels, place, strict=True)), float(self.values[tuple(place)]))
            for place in places
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not a number is None."""
        told: dict[str, Any] = {"title": self.title, "unit": self.unit, "note": self.note, "axes": list(self.axes)}
        told["labels"] = {axis: list(names) for axis, names in zip(self.axes, self.labels, strict=True)}
        told["values"] = replace_nonfinite(self.values.tolist())
        if self.annotations is not None:
            told["annotations"] = self.annotations.tolist()
        return told

    def plot(self, **plot_kwargs: Any) -> Any:
        """Lines or bars of one axis, a heat map of two, one map beside another of three."""
        return plot_labeled_tensor(self, **plot_kwargs)

    def __repr__(self) -> str:
        head = self.title + (f" ({self.unit})" if self.unit else "")
        tables = [
            (f"{self.axes[-1]} {name}\n" if name else "") + _render_text_table(part)
            for name, part in self.split_tables()
        ]
        return "\n".join([head, *tables, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        head = f"<b>{escape(self.title)}</b>" + (f" ({escape(self.unit)})" if self.unit else "")
        tables = [
            (f"<p>{escape(self.axes[-1])} {escape(name)}</p>" if name else "") + _render_html_table(part)
            for name, part in self.split_tables()
        ]
        return f"<div>{head}{''.join(tables)}<small>{escape(self.note)}</small></div>"

    def split_tables(self) -> list[tuple[str, "LabeledTensor"]]:
        """As tables of at most two axes: one for each place on a third."""
        if len(self.axes) <= 2:
            return [("", self)]
        parts = [(name, self.select(**{self.axes[-1]: at})) for at, name in enumerate(self.labels[-1])]
        return [
            (" · ".join(filter(None, (name, inner))), sheet)
            for name, part in parts
            for inner, sheet in part.split_tables()
        ]


def show_whitespace(label: str) -> str:
    """A token's text with its blanks and line ends to be seen."""
    text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in label.replace("\n", "↵"))
    ends = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "·" * len(text) if not text.strip(" ") else "·" * ends[0] + text.strip(" ") + "·" * ends[1]


def replace_nonfinite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they are told as nothing."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_rows(tensor: LabeledTensor) -> tuple[list[str], list[tuple[str, list[tuple[str, float]]]], str]:
    """(names of columns, (name of row, (text, value) of each cell), what was left out) of one or two axes."""
    values, texts, labels = tensor.values, tensor.annotations, tensor.labels
    if not tensor.axes:
        return [], [("", [(_format_value(float(values)), float(values))])], ""
    if len(tensor.axes) == 1:
        values, texts = values[:, None], None if texts is None else texts[:, None]
        labels = (labels[0], (tensor.unit or "value",))
    rows = []
    for at, name in enumerate(labels[0][:MAX_TABLE_ROWS]):
        cells = [float(value) for value in values[at, :MAX_TABLE_COLUMNS]]
        words = [_format_value(cell) for cell in cells]
        if texts is not None:
            words = [f"{show_whitespace(text)} {word}" for text, word in zip(texts[at], words, strict=False)]
        rows.append((show_whitespace(name), list(zip(words, cells, strict=True))))
    hidden = [
        f"{len(names) - most} more {axis}s"
        for names, most, axis in zip(labels, (MAX_TABLE_ROWS, MAX_TABLE_COLUMNS), (*tensor.axes, ""), strict=False)
        if len(names) > most
    ]
    return (
        [show_whitespace(name) for name in labels[1][:MAX_TABLE_COLUMNS]],
        rows,
        f"… {' and '.join(hidden)}" if hidden else "",
    )


def _format_value(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.3g}"


def _render_text_table(tensor: LabeledTensor) -> str:
    columns, rows, rest = _table_rows(tensor)
    lines = [[name, *(word for word, _ in cells)] for name, cells in rows]
    lines = [["", *columns], *lines] if columns else lines
    wide = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    text = [
        "  ".join(word.ljust(width) if not at else word.rjust(width) for at, (word, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, wide, strict=True)) for line in lines)
    ]
    return "\n".join([*text, *([rest] if rest else [])])


def _render_html_table(tensor: LabeledTensor) -> str:
    """Cells are shaded by their size: blue above 0, red below."""
    columns, rows, rest = _table_rows(tensor)
    top = max((abs(value) for _, cells in rows for _, value in cells if math.isfinite(value)), default=0.0) or 1.0
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(_render_shaded_cell(word, value / top) for word, value in cells)}</tr>"
        for name, cells in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{escape(rest)}"


def _render_shaded_cell(text: str, intensity: float) -> str:
    strength = min(abs(intensity), 1.0) * 0.55 if math.isfinite(intensity) else 0.0
    colour = "70,120,200" if intensity > 0 else "200,80,70"
    return f'<td style="background:rgba({colour},{strength:.2f})">{escape(text)}</td>'


def plot_labeled_tensor(tensor: LabeledTensor, **plot_kwargs: Any) -> Any:
    """A figure, closed: it is shown where it is returned and leaves nothing open."""
    from matplotlib import pyplot

    if not 1 <= len(tensor.axes) <= 3:
        raise InputError(f"{len(tensor.axes)} axes cannot be drawn; index the tensor down to one, two or three")
    panels = tensor.split_tables()
    title, note = _wrap_text(tensor.title, 50), _wrap_text(tensor.note, 60)
    high, wide = _panel_size(panels[0][1])
    across = min(len(panels), 4)
    down = -(-len(panels) // across)
    size = plot_kwargs.pop("figsize", (wide * across, high * down + 0.17 * (title + note).count("\n")))
    with pyplot.rc_context(PLOT_STYLE):
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        shared = _color_limits(tensor)
        for place, (name, part) in zip(grid.flat, panels, strict=False):
            if _is_heatmap(part):
                image = _draw_heatmap(place, part, shared | plot_kwargs)
            else:
                _draw_lines_or_bars(place, part, plot_kwargs)
            if name:
                place.set_title(name, fontsize=9)
        for place in grid.flat[len(panels) :]:
            place.set_visible(False)
        if _is_heatmap(panels[0][1]):
            figure.colorbar(image, ax=grid, label=tensor.unit, shrink=0.8).outline.set_visible(False)
        figure.suptitle(_wrap_text(tensor.title, size[0] * 13), fontsize=10)
        figure.supxlabel(_wrap_text(tensor.note, size[0] * 17), fontsize=7, color="#555555")
    pyplot.close(figure)
    return figure


def _wrap_text(text: str, width: float) -> str:
    return fill(text, max(int(width), 20))


def _is_heatmap(tensor: LabeledTensor) -> bool:
    """Two axes, unless the second is depth: then a line for each place on the first can be followed."""
    return len(tensor.axes) == 2 and tensor.axes[1] != "layer"


def _has_horizontal_bars(tensor: LabeledTensor) -> bool:
    """Whether its bars lie."""
    return (
        len(tensor.axes) == 1
        and tensor.axes[0] not in ORDERED_AXES
        and max(map(len, tensor.labels[0])) > LONG_LABEL_CHARS
    )


def _panel_size(tensor: LabeledTensor) -> tuple[float, float]:
    """Inches, high and wide."""
    if _has_horizontal_bars(tensor):
        return min(max(1.6, 1.1 + 0.2 * tensor.shape[0]), 12.0), 6.5
    if not _is_heatmap(tensor):
        return 3.2, min(max(5.0, 0.22 * tensor.shape[-1]), 16.0)
    column = 0.62 if tensor.annotations is not None else 0.42 if tensor.values.numel() <= MAX_ANNOTATED_CELLS else 0.3
    names = 0.07 * max(map(len, tensor.labels[0]))
    return min(max(2.4, 1.4 + 0.25 * tensor.shape[0]), 12.0), min(
        max(2.8, 1.6 + names + column * tensor.shape[1]), 12.0
    )


def _color_limits(tensor: LabeledTensor) -> dict[str, Any]:
    """One scale for all maps: from 0, or alike on both sides of it."""
    known = np.nan_to_num(tensor.values.float().cpu().numpy(), posinf=0.0, neginf=0.0)
    top = float(np.abs(known).max(initial=0.0)) or 1.0
    if (known < -SIGN_TOLERANCE * top).any():
        return {"cmap": "RdBu", "vmin": -top, "vmax": top}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": top}


def _draw_heatmap(ax: Any, tensor: LabeledTensor, plot_kwargs: dict[str, Any]) -> Any:
    values = tensor.values.float().cpu().numpy()
    image = ax.imshow(values, aspect="auto", interpolation="nearest", **plot_kwargs)
    ax.spines[:].set_visible(False)
    written = None
    if tensor.annotations is not None and values.size <= 1200:
        written = np.vectorize(lambda text: _truncate(text, 10), otypes=[object])(tensor.annotations)
    elif tensor.annotations is None and values.size <= MAX_ANNOTATED_CELLS:
        written = np.vectorize(lambda value: _format_cell(value, tensor), otypes=[object])(values)
    for (row, column), text in np.ndenumerate(written if written is not None else np.empty((0, 0))):
        if text:
            colour = "white" if _is_dark(image, float(values[row, column])) else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
    _set_ticks(ax.yaxis, tensor.axes[0], tensor.labels[0])
    _set_ticks(ax.xaxis, tensor.axes[1], tensor.labels[1])
    return image


def _is_dark(image: Any, value: float) -> bool:
    """Whether black on this value's colour would be hard to read."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.5


def _draw_lines_or_bars(ax: Any, tensor: LabeledTensor, plot_kwargs: dict[str, Any]) -> None:
    values = tensor.values.float().cpu().numpy()
    values = np.where(np.isfinite(values), values, np.nan)  # no line goes there
    spots = np.arange(values.shape[-1])
    if _has_horizontal_bars(tensor):
        _draw_horizontal_bars(ax, tensor, values, plot_kwargs)
        return
    if len(tensor.axes) == 2:
        for name, row in zip(tensor.labels[0], values, strict=True):
            ax.plot(spots, row, marker="o", markersize=3, label=show_whitespace(name), **plot_kwargs)
        ax.legend(fontsize=8, frameon=False)
    elif tensor.axes[0] in ORDERED_AXES:
        ax.plot(spots, values, marker="o", markersize=3, **{"color": POSITIVE_COLOR} | plot_kwargs)
    else:
        ax.bar(
            spots,
            values,
            **{"color": [NEGATIVE_COLOR if value < 0 else POSITIVE_COLOR for value in values]} | plot_kwargs,
        )
    ax.axhline(0, color="grey", linewidth=0.5)
    ax.set_ylabel(tensor.unit)
    _set_ticks(ax.xaxis, tensor.axes[-1], tensor.labels[-1])


def _draw_horizontal_bars(ax: Any, tensor: LabeledTensor, values: Any, plot_kwargs: dict[str, Any]) -> None:
    """Bars from the top down, each with its number."""
    bars = ax.barh(
        np.arange(len(values)),
        values,
        **{"color": [NEGATIVE_COLOR if value < 0 else POSITIVE_COLOR for value in values]} | plot_kwargs,
    )
    if len(values) <= MAX_ANNOTATED_CELLS:
        ax.bar_label(bars, [_format_cell(value, tensor) for value in values], padding=2, fontsize=7)
        ax.margins(x=0.1)
    ax.margins(y=0.02)
    ax.invert_yaxis()
    ax.axvline(0, color="grey", linewidth=0.5)
    ax.set_xlabel(tensor.unit)
    _set_ticks(ax.yaxis, tensor.axes[0], tensor.labels[0])


def _format_cell(value: float, tensor: LabeledTensor) -> str:
    """As many places as the largest value leaves room for."""
    if math.isnan(value):
        return ""
    top = float(tensor.values.abs().nan_to_num(0.0, posinf=0.0).max())
    places = 2 - math.floor(math.log10(top)) if top else 0
    told = f"{value:.{min(max(places if top >= 1 else places - 1, 0), 6)}f}".replace("-", "−")
    return "0" if not told.strip("−0.") else told


def _set_ticks(axis: Any, name: str, labels: tuple[str, ...]) -> None:
    """Ticks with labels, so few that they can be read."""
    step = -(-len(labels) // MAX_TICK_LABELS)
    spots = list(range(0, len(labels), step))
    words = [_truncate(labels[at], 40) for at in spots]
    room = axis.get_figure().get_figwidth() / axis.axes.get_gridspec().ncols - 1.6  # inches, beside numbers and scale
    long = axis.axis_name == "x" and CHAR_WIDTH_INCHES * max(map(len, words), default=0) > room / max(len(words), 1)
    axis.set_ticks(spots, words, fontsize=7, rotation=90 if long else 0)
    axis.set_tick_params(length=2, color="grey")
    axis.set_label_text(name)


def _truncate(text: str, max_chars: int) -> str:
    text = show_whitespace(text)
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
