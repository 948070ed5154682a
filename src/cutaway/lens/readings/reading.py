"""A reading: numbers with names on every axis, that print, draw and index themselves."""

import math
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from torch import Tensor

from cutaway.errors import InputError

Label = str | int | slice | list[str] | list[int]
"""Of an axis: one by its label or number, several, or a range. One alone takes the axis away."""

SHOWN_ROWS, SHOWN_COLUMNS = 64, 24


@dataclass(frozen=True, eq=False, repr=False)
class Reading:
    """A labelled array, with what it is a picture of."""

    title: str
    values: Tensor
    axes: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    """A label for each place on each axis; two tokens may have the same."""
    unit: str = ""
    note: str = ""
    """What one should know to read it."""
    texts: Any = None
    """What to write on each value: a numpy array of texts of the same shape, or None."""

    def __post_init__(self) -> None:
        assert tuple(self.values.shape) == tuple(map(len, self.labels)), (self.values.shape, self.labels)
        assert len(set(self.axes)) == len(self.labels)
        assert self.texts is None or self.texts.shape == tuple(self.values.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __float__(self) -> float:
        if self.values.numel() != 1:
            raise InputError(f"{self.title} has {self.values.numel()} values; index it down to one")
        return float(self.values)

    def __getitem__(self, asked: Label | tuple[Label, ...]) -> "Reading":
        """By labels or numbers, axis after axis: r["3", :, "induction"]."""
        keys = asked if isinstance(asked, tuple) else (asked,)
        if len(keys) > len(self.axes):
            raise InputError(f"{len(keys)} places were given, and this reading has the axes {', '.join(self.axes)}")
        return self.at(**dict(zip(self.axes, keys, strict=False)))

    def at(self, **places: Label) -> "Reading":
        """By the names of axes: r.at(kind="induction", layer=3)."""
        values, texts, axes, labels = self.values, self.texts, list(self.axes), list(self.labels)
        title = self.title
        for axis, place in places.items():
            if axis not in self.axes:
                raise InputError(f"this reading has no axis '{axis}'; it has {', '.join(self.axes)}")
            where = axes.index(axis)
            found = self.find(axis, place)
            kept = (slice(None),) * where + (found,)
            values, texts = values[kept], None if texts is None else texts[kept]
            if isinstance(found, int):
                axes.pop(where)
                title = f"{title}, {axis} {shown(labels.pop(where)[found])}"
            else:
                labels[where] = tuple(labels[where][number] for number in found)
        texts = np.array(texts, dtype=object) if texts is not None else None
        return replace(self, title=title, values=values, texts=texts, axes=tuple(axes), labels=tuple(labels))

    def find(self, axis: str, place: Any) -> int | list[int]:
        """The numbers of the places meant on an axis."""
        labels = self.labels[self.axes.index(axis)]
        if isinstance(place, slice | list | tuple):
            found = list(range(len(labels)))[place] if isinstance(place, slice) else [self.one(axis, p) for p in place]
            if not found:
                raise InputError(f"{place} leaves nothing of the axis {axis}, which has {len(labels)} places")
            return found
        return self.one(axis, place)

    def one(self, axis: str, place: Any) -> int:
        labels = self.labels[self.axes.index(axis)]
        if isinstance(place, str):
            numbers = [number for number, label in enumerate(labels) if label == place]
            if len(numbers) != 1:
                why = "is not on" if not numbers else f"stands {len(numbers)} times on"
                known = ", ".join(map(shown, labels[:8])) + (" …" if len(labels) > 8 else "")
                raise InputError(f"'{shown(place)}' {why} the axis {axis} ({known}); give its number, from 0")
            return numbers[0]
        if not isinstance(place, int) or isinstance(place, bool) or not -len(labels) <= place < len(labels):
            raise InputError(f"the axis {axis} has {len(labels)} places, and {place!r} is none of them")
        return place % len(labels)

    def sum(self, axis: str) -> "Reading":
        """Added up along an axis."""
        if axis not in self.axes:
            raise InputError(f"this reading has no axis '{axis}'; it has {', '.join(self.axes)}")
        where = self.axes.index(axis)
        axes, labels = list(self.axes), list(self.labels)
        del axes[where], labels[where]
        return replace(self, values=self.values.nansum(where), axes=tuple(axes), labels=tuple(labels), texts=None)

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
        told["values"] = finite(self.values.tolist())
        if self.texts is not None:
            told["texts"] = self.texts.tolist()
        return told

    def plot(self, **how: Any) -> Any:
        """Lines or bars of one axis, a heat map of two, one map beside another of three."""
        from cutaway.lens.readings.picture import picture

        return picture(self, **how)

    def __repr__(self) -> str:
        head = self.title + (f" ({self.unit})" if self.unit else "")
        tables = [(f"{self.axes[-1]} {name}\n" if name else "") + text_table(part) for name, part in self.sheets()]
        return "\n".join([head, *tables, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        head = f"<b>{escape(self.title)}</b>" + (f" ({escape(self.unit)})" if self.unit else "")
        tables = [
            (f"<p>{escape(self.axes[-1])} {escape(name)}</p>" if name else "") + html_table(part)
            for name, part in self.sheets()
        ]
        return f"<div>{head}{''.join(tables)}<small>{escape(self.note)}</small></div>"

    def sheets(self) -> list[tuple[str, "Reading"]]:
        """As tables of at most two axes: one for each place on a third."""
        if len(self.axes) <= 2:
            return [("", self)]
        parts = [(name, self.at(**{self.axes[-1]: at})) for at, name in enumerate(self.labels[-1])]
        return [
            (" · ".join(filter(None, (name, inner))), sheet) for name, part in parts for inner, sheet in part.sheets()
        ]


def shown(label: str) -> str:
    """A token's text with its blanks and line ends to be seen."""
    text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in label.replace("\n", "↵"))
    ends = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "·" * len(text) if not text.strip(" ") else "·" * ends[0] + text.strip(" ") + "·" * ends[1]


def finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity: they are told as nothing."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rows_of(reading: Reading) -> tuple[list[str], list[tuple[str, list[tuple[str, float]]]], str]:
    """(names of columns, (name of row, (text, value) of each cell), what was left out) of one or two axes."""
    values, texts, labels = reading.values, reading.texts, reading.labels
    if not reading.axes:
        return [], [("", [(number(float(values)), float(values))])], ""
    if len(reading.axes) == 1:
        values, texts = values[:, None], None if texts is None else texts[:, None]
        labels = (labels[0], (reading.unit or "value",))
    rows = []
    for at, name in enumerate(labels[0][:SHOWN_ROWS]):
        cells = [float(value) for value in values[at, :SHOWN_COLUMNS]]
        words = [number(cell) for cell in cells]
        if texts is not None:
            words = [f"{shown(text)} {word}" for text, word in zip(texts[at], words, strict=False)]
        rows.append((shown(name), list(zip(words, cells, strict=True))))
    hidden = [
        f"{len(names) - most} more {axis}s"
        for names, most, axis in zip(labels, (SHOWN_ROWS, SHOWN_COLUMNS), (*reading.axes, ""), strict=False)
        if len(names) > most
    ]
    return [shown(name) for name in labels[1][:SHOWN_COLUMNS]], rows, f"… {' and '.join(hidden)}" if hidden else ""


def number(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.3g}"


def text_table(reading: Reading) -> str:
    columns, rows, rest = rows_of(reading)
    lines = [[name, *(word for word, _ in cells)] for name, cells in rows]
    lines = [["", *columns], *lines] if columns else lines
    wide = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    text = [
        "  ".join(word.ljust(width) if not at else word.rjust(width) for at, (word, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, wide, strict=True)) for line in lines)
    ]
    return "\n".join([*text, *([rest] if rest else [])])


def html_table(reading: Reading) -> str:
    """Cells are shaded by their size: blue above 0, red below."""
    columns, rows, rest = rows_of(reading)
    top = max((abs(value) for _, cells in rows for _, value in cells if math.isfinite(value)), default=0.0) or 1.0
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(shaded(word, value / top) for word, value in cells)}</tr>"
        for name, cells in rows
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{escape(rest)}"


def shaded(word: str, share: float) -> str:
    strength = min(abs(share), 1.0) * 0.55 if math.isfinite(share) else 0.0
    colour = "70,120,200" if share > 0 else "200,80,70"
    return f'<td style="background:rgba({colour},{strength:.2f})">{escape(word)}</td>'
