"""`LabeledTensor`: a tensor with named axes and labels. It can be indexed by label, shown as a table and plotted."""

import math
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cutaway.errors import InputError
from cutaway.evaluate.calibration import BLUE, PLOT_STYLE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_PlotKwargs = dict[str, Any]
"""Keyword arguments of the matplotlib function that draws the values."""
LabelIndex = str | int | slice | list[str] | list[int]
"""Index of one axis. A label or a number removes the axis; a list of labels or numbers, or a slice, keeps it."""
_MAX_TABLE_ROWS, _MAX_TABLE_COLUMNS = 64, 24
_ORDERED_AXES = ("layer", "sublayer", "position", "other position")
"""Axes whose labels have an order and which are plotted as lines. Other axes are plotted as bars."""
_MAX_TICK_LABELS = 72
_MAX_INDEX_LABELS = 16
"""Maximum number of tick labels of an axis whose labels are the indices 0, 1, 2 …."""
_MAX_ANNOTATED_CELLS = 120
"""Maximum number of heat map cells or bars that are annotated with their values."""
_SIGN_TOLERANCE = 1e-4
"""The color map has negative colors only if a value is below −_SIGN_TOLERANCE · max|value|, not for rounding errors."""
_LONG_LABEL_CHARS = 12
"""Bars with a label longer than this are drawn horizontally."""
_CHAR_INCHES = 0.06
"""Estimated width of one character of a tick label."""


@dataclass(frozen=True, eq=False, repr=False)
class LabeledTensor:
    """A tensor with named axes and a label per index, plus the title, unit and note for display."""

    title: str
    values: Tensor
    axes: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    """One tuple per axis, with one label per index. Labels may repeat, for example if a token occurs twice."""
    unit: str = ""
    note: str = ""
    """Text below the table or plot."""
    annotations: NDArray[np.object_] | None = None
    """Text for each value, or None."""

    def __post_init__(self) -> None:
        assert tuple(self.values.shape) == tuple(map(len, self.labels)), (self.values.shape, self.labels)
        assert len(set(self.axes)) == len(self.labels)
        assert self.annotations is None or self.annotations.shape == tuple(self.values.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __float__(self) -> float:
        if self.values.numel() != 1:
            raise InputError(f"'{self.title}' has {self.values.numel()} values, not one; index it to select one value")
        return float(self.values)

    def __getitem__(self, key: LabelIndex | tuple[LabelIndex, ...]) -> "LabeledTensor":
        """Index by labels or numbers, in axis order: r["3", :, "induction"]."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.axes):
            axes = f"{len(self.axes)} axes ({', '.join(self.axes)})"
            raise InputError(f"{len(keys)} indices for {axes}; pass at most one per axis")
        return self.select(**dict(zip(self.axes, keys, strict=False)))

    def select(self, **selection: LabelIndex) -> "LabeledTensor":
        """Index by axis name: r.select(head_type="induction", layer=3)."""
        values, annotations, axes, labels = self.values, self.annotations, list(self.axes), list(self.labels)
        title = self.title
        for axis, key in selection.items():
            indices = self._find_indices(axis, key)
            dim = axes.index(axis)
            index = (slice(None),) * dim + (indices,)
            values, annotations = values[index], None if annotations is None else annotations[index]
            if isinstance(indices, int):
                axes.pop(dim)
                title = f"{title}, {axis} {show_whitespace(labels.pop(dim)[indices])}"
            else:
                labels[dim] = tuple(labels[dim][number] for number in indices)
        annotations = np.array(annotations, dtype=object) if annotations is not None else None
        axis_names, axis_labels = tuple(axes), tuple(labels)
        return replace(self, title=title, values=values, annotations=annotations, axes=axis_names, labels=axis_labels)

    def _dim(self, axis: str) -> int:
        if axis not in self.axes:
            raise InputError(f"this tensor has no axis '{axis}'; it has {', '.join(self.axes)}")
        return self.axes.index(axis)

    def _find_indices(self, axis: str, key: LabelIndex) -> int | list[int]:
        """Convert a label, number, list or slice to one index or a list of indices of an axis."""
        size = self.shape[self._dim(axis)]
        if not isinstance(key, slice | list | tuple):
            return self._find_index(axis, key)
        indices = range(size)[key] if isinstance(key, slice) else [self._find_index(axis, item) for item in key]
        if not indices:
            raise InputError(f"{key} selects none of the {size} labels of the axis {axis}; pass labels or indices")
        return list(indices)

    def _find_index(self, axis: str, key: object) -> int:
        labels = self.labels[self._dim(axis)]
        if isinstance(key, str):
            numbers = [number for number, label in enumerate(labels) if label == key]
            if len(numbers) != 1:
                problem = "is not a label of" if not numbers else f"occurs {len(numbers)} times on"
                examples = ", ".join(map(show_whitespace, labels[:8])) + (" …" if len(labels) > 8 else "")
                raise InputError(f"'{show_whitespace(key)}' {problem} the axis {axis} ({examples}); pass an index")
            return numbers[0]
        if not isinstance(key, int) or isinstance(key, bool) or not -len(labels) <= key < len(labels):
            raise InputError(f"{key!r} is not an index of the axis {axis}; pass 0 to {len(labels) - 1} or a label")
        return key % len(labels)

    def sum(self, axis: str) -> "LabeledTensor":
        """Sum along an axis. NaN counts as 0."""
        dim = self._dim(axis)
        axes, labels = self.axes[:dim] + self.axes[dim + 1 :], self.labels[:dim] + self.labels[dim + 1 :]
        return replace(self, values=self.values.nansum(dim), axes=axes, labels=labels, annotations=None)

    def top(self, count: int = 10) -> list[tuple[tuple[str, ...], float]]:
        """Return (labels, value) for the `count` values of largest magnitude, largest first."""
        flat = self.values.flatten()
        order = flat.abs().nan_to_num(-1.0).argsort(descending=True, stable=True)[:count].tolist()
        labels = list(product(*self.labels))
        return [(labels[number], float(flat[number])) for number in order if not math.isnan(flat[number])]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. NaN and infinity become None."""
        labels = {axis: list(names) for axis, names in zip(self.axes, self.labels, strict=True)}
        fields: dict[str, Any] = {"title": self.title, "unit": self.unit, "note": self.note, "axes": list(self.axes)}
        fields |= {"labels": labels, "values": replace_nonfinite(self.values.tolist())}
        return fields if self.annotations is None else fields | {"annotations": self.annotations.tolist()}

    def plot(self, **plot_kwargs: Any) -> "Figure":
        """Plot a line or bars (for one axis), a heat map or lines (for two), or several of these (for three axes)."""
        return _plot_labeled_tensor(self, plot_kwargs)

    def __repr__(self) -> str:
        head = self.title + (f" ({self.unit})" if self.unit else "")
        lines = [head]
        for name, part in self.split_tables():
            lines += [f"{self.axes[-1]} {name}", _render_text_table(part)] if name else [_render_text_table(part)]
        return "\n".join([*lines, self.note] if self.note else lines)

    def _repr_html_(self) -> str:
        head = f"<b>{escape(self.title)}</b>" + (f" ({escape(self.unit)})" if self.unit else "")
        for name, part in self.split_tables():
            head += f"<p>{escape(self.axes[-1])} {escape(name)}</p>" if name else ""
            head += _render_html_table(part)
        return f"<div>{head}<small>{escape(self.note)}</small></div>"

    def split_tables(self) -> list[tuple[str, "LabeledTensor"]]:
        """Split into (name, table) pairs: tables of the first two axes, one for each index of the other axes."""
        if len(self.axes) <= 2:
            return [("", self)]
        tables = []
        for index, name in enumerate(self.labels[-1]):
            for inner, table in self.select(**{self.axes[-1]: index}).split_tables():
                tables.append((f"{name} · {inner}" if inner else name, table))
        return tables


def show_whitespace(label: str) -> str:
    """Return a token's text with visible leading and trailing spaces (·), line ends (↵) and control characters."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in label.replace("\n", "↵"))
    spaces = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return "·" * len(text) if not text.strip(" ") else "·" * spaces[0] + text.strip(" ") + "·" * spaces[1]


def replace_nonfinite(value: object) -> object:
    """Replace NaN and infinity by None, recursively, because JSON has neither."""
    if isinstance(value, dict):
        return {name: replace_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table_rows(tensor: LabeledTensor) -> tuple[list[str], list[tuple[str, list[tuple[str, float]]]], str]:
    """Return (column names, [(row name, [(text, value) per cell])], note on omitted rows and columns)."""
    values, annotations, labels = tensor.values, tensor.annotations, tensor.labels
    if not tensor.axes:
        return [], [("", [(_format_value(float(values)), float(values))])], ""
    if len(tensor.axes) == 1:
        values, annotations = values[:, None], None if annotations is None else annotations[:, None]
        labels = (labels[0], (tensor.unit or "value",))
    rows = []
    for row, name in enumerate(labels[0][:_MAX_TABLE_ROWS]):
        numbers = [float(value) for value in values[row, :_MAX_TABLE_COLUMNS]]
        texts = [_format_value(number) for number in numbers]
        if annotations is not None:
            texts = [f"{show_whitespace(note)} {text}" for note, text in zip(annotations[row], texts, strict=False)]
        rows.append((show_whitespace(name), list(zip(texts, numbers, strict=True))))
    omitted = [
        f"{len(names) - limit} more {axis}s"
        for names, limit, axis in zip(labels, (_MAX_TABLE_ROWS, _MAX_TABLE_COLUMNS), (*tensor.axes, ""), strict=False)
        if len(names) > limit
    ]
    columns = [show_whitespace(name) for name in labels[1][:_MAX_TABLE_COLUMNS]]
    return columns, rows, f"… {' and '.join(omitted)}" if omitted else ""


def _format_value(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if abs(value) < 1e6 and value == round(value) else f"{value:.3g}"


def _render_text_table(tensor: LabeledTensor) -> str:
    columns, rows, omitted = _table_rows(tensor)
    lines = [[name, *(text for text, _ in cells)] for name, cells in rows]
    lines = [["", *columns], *lines] if columns else lines
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = []
    for name, *cells in lines:  # row names are left-aligned, values right-aligned
        padded = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(cells, widths[1:], strict=True))]
        table.append("  ".join(padded).rstrip())
    return "\n".join([*table, omitted] if omitted else table)


def _render_html_table(tensor: LabeledTensor) -> str:
    """Render an HTML table whose cells are shaded by magnitude: blue if positive, red if negative."""
    columns, rows, omitted = _table_rows(tensor)
    top = max((abs(value) for _, cells in rows for _, value in cells if math.isfinite(value)), default=0.0) or 1.0
    body = ""
    for name, cells in rows:
        shaded = "".join(_render_shaded_cell(text, value / top) for text, value in cells)
        body += f"<tr><th>{escape(name)}</th>{shaded}</tr>"
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{escape(omitted)}"


def _render_shaded_cell(text: str, intensity: float) -> str:
    alpha = min(abs(intensity), 1.0) * 0.55 if math.isfinite(intensity) else 0.0
    color = "70,120,200" if intensity > 0 else "200,80,70"
    return f'<td style="background:rgba({color},{alpha:.2f})">{escape(text)}</td>'


def _plot_labeled_tensor(tensor: LabeledTensor, plot_kwargs: _PlotKwargs) -> "Figure":
    """Return a matplotlib figure. It is closed in pyplot, so that a notebook does not display it twice."""
    from matplotlib import pyplot

    if not 1 <= len(tensor.axes) <= 3:
        raise InputError(f"the tensor has {len(tensor.axes)} axes, but 1 to 3 can be plotted; index it to 1 to 3 axes")
    panels = tensor.split_tables()
    title, note = _wrap_text(tensor.title, 50), _wrap_text(tensor.note, 60)
    height, width = _panel_size(panels[0][1])
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    figsize = plot_kwargs.pop("figsize", (width * columns, height * rows + 0.17 * (title + note).count("\n")))
    with pyplot.rc_context(PLOT_STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=figsize, squeeze=False, layout="constrained")
        colors = _color_limits(tensor)  # one scale for all panels
        for ax, (name, part) in zip(axes.flat, panels, strict=False):
            if _is_heatmap(part):
                image = _draw_heatmap(ax, part, colors | plot_kwargs)
            else:
                _draw_lines_or_bars(ax, part, plot_kwargs)
            if name:
                ax.set_title(name, fontsize=9)
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        if _is_heatmap(panels[0][1]):
            figure.colorbar(image, ax=axes, label=tensor.unit, shrink=0.8).outline.set_visible(False)
        figure.suptitle(_wrap_text(tensor.title, figsize[0] * 13), fontsize=10)
        figure.supxlabel(_wrap_text(tensor.note, figsize[0] * 17), fontsize=7, color="#555555")
    pyplot.close(figure)
    return figure


def _wrap_text(text: str, width: float) -> str:
    return fill(text, max(int(width), 20))


def _is_heatmap(tensor: LabeledTensor) -> bool:
    """Whether a tensor with two axes is plotted as a heat map. If the second axis is `layer`, each row is a line."""
    return len(tensor.axes) == 2 and tensor.axes[1] != "layer"


def _has_horizontal_bars(tensor: LabeledTensor) -> bool:
    """Whether the tensor is plotted as horizontal bars, which leave space for long labels."""
    is_bar_plot = len(tensor.axes) == 1 and tensor.axes[0] not in _ORDERED_AXES
    return is_bar_plot and max(map(len, tensor.labels[0])) > _LONG_LABEL_CHARS


def _panel_size(tensor: LabeledTensor) -> tuple[float, float]:
    """Return (height, width) of one panel in inches."""
    if _has_horizontal_bars(tensor):
        return min(max(1.6, 1.1 + 0.2 * tensor.shape[0]), 12.0), 6.5
    if not _is_heatmap(tensor):
        return 3.2, min(max(5.0, 0.22 * tensor.shape[-1]), 16.0)
    column = 0.42 if tensor.values.numel() <= _MAX_ANNOTATED_CELLS else 0.3
    column = column if tensor.annotations is None else 0.62
    names = 0.07 * max(map(len, tensor.labels[0]))
    num_rows, num_columns = (min(len(labels), _max_tick_labels(labels)) for labels in tensor.labels)
    height, width = 1.4 + 0.25 * num_rows, 1.6 + names + column * num_columns
    return min(max(2.4, height), 12.0), min(max(2.8, width), 12.0)


def _color_limits(tensor: LabeledTensor) -> _PlotKwargs:
    """Return the color map and its limits: 0 to the maximum, or symmetric around 0 if there are negative values."""
    finite = np.nan_to_num(tensor.values.float().cpu().numpy(), posinf=0.0, neginf=0.0)
    top = float(np.abs(finite).max(initial=0.0)) or 1.0
    if (finite < -_SIGN_TOLERANCE * top).any():
        return {"cmap": "RdBu", "vmin": -top, "vmax": top}
    return {"cmap": "Blues", "vmin": 0.0, "vmax": top}


def _finite_or_nan(tensor: LabeledTensor) -> NDArray[np.float32]:
    """Return the values with NaN in place of ±∞. NaN is a gap in a line and a blank cell in a heat map."""
    values = tensor.values.float().cpu().numpy()
    return np.where(np.isfinite(values), values, np.nan)


def _draw_heatmap(ax: "Axes", tensor: LabeledTensor, plot_kwargs: _PlotKwargs) -> "AxesImage":
    values = _finite_or_nan(tensor)
    image = ax.imshow(values, aspect="auto", interpolation="nearest", **plot_kwargs)
    ax.spines[:].set_visible(False)
    texts = np.empty((0, 0), dtype=object)
    if tensor.annotations is not None and values.size <= 1200:
        texts = np.vectorize(lambda text: _truncate(text, 10), otypes=[object])(tensor.annotations)
    elif tensor.annotations is None and values.size <= _MAX_ANNOTATED_CELLS:
        texts = np.vectorize(lambda value: _format_cell(value, tensor), otypes=[object])(values)
    for (row, column), text in np.ndenumerate(texts):
        if text:
            color = "white" if _is_dark(image, float(values[row, column])) else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    _set_ticks(ax.yaxis, tensor.axes[0], tensor.labels[0])
    _set_ticks(ax.xaxis, tensor.axes[1], tensor.labels[1])
    return image


def _is_dark(image: Any, value: float) -> bool:
    """Whether black text on this value's color would be hard to read (luma below 0.5)."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.5


def _draw_lines_or_bars(ax: "Axes", tensor: LabeledTensor, plot_kwargs: _PlotKwargs) -> None:
    values = _finite_or_nan(tensor)
    ticks = np.arange(values.shape[-1])
    if _has_horizontal_bars(tensor):
        _draw_horizontal_bars(ax, tensor, values, plot_kwargs)
        return
    if len(tensor.axes) == 2:
        for name, row in zip(tensor.labels[0], values, strict=True):
            ax.plot(ticks, row, marker="o", markersize=3, label=show_whitespace(name), **plot_kwargs)
        ax.legend(fontsize=8, frameon=False)
    elif tensor.axes[0] in _ORDERED_AXES:
        ax.plot(ticks, values, **_PlotKwargs(marker="o", markersize=3, color=BLUE) | plot_kwargs)
    else:
        ax.bar(ticks, values, **_sign_colors(values) | plot_kwargs)
    ax.axhline(0, color="grey", linewidth=0.5)
    ax.set_ylabel(tensor.unit)
    _set_ticks(ax.xaxis, tensor.axes[-1], tensor.labels[-1])


def _sign_colors(values: NDArray[np.float32]) -> _PlotKwargs:
    """Return the bar colors: blue if positive, red if negative."""
    return {"color": [RED if value < 0 else BLUE for value in values]}


def _draw_horizontal_bars(
    ax: "Axes", tensor: LabeledTensor, values: NDArray[np.float32], plot_kwargs: _PlotKwargs
) -> None:
    """Draw bars from top to bottom, annotated with their values."""
    bars = ax.barh(np.arange(len(values)), values, **_sign_colors(values) | plot_kwargs)
    if len(values) <= _MAX_ANNOTATED_CELLS:
        ax.bar_label(bars, [_format_cell(value, tensor) for value in values], padding=2, fontsize=7)
        ax.margins(x=0.1)
    ax.margins(y=0.02)
    ax.invert_yaxis()
    ax.axvline(0, color="grey", linewidth=0.5)
    ax.set_xlabel(tensor.unit)
    _set_ticks(ax.yaxis, tensor.axes[0], tensor.labels[0])


def _format_cell(value: float, tensor: LabeledTensor) -> str:
    """Format a value with the number of decimals that gives the tensor's largest value two or three digits."""
    if math.isnan(value):
        return ""
    top = float(tensor.values.abs().nan_to_num(0.0, posinf=0.0).max())
    decimals = 2 - math.floor(math.log10(top)) if top else 0
    text = f"{value:.{min(max(decimals if top >= 1 else decimals - 1, 0), 6)}f}".replace("-", "−")
    return "0" if not text.strip("−0.") else text


def _set_ticks(axis: Any, name: str, labels: tuple[str, ...]) -> None:
    """Set the name and the tick labels of a plot axis; x labels that would overlap are rotated."""
    step = -(-len(labels) // _max_tick_labels(labels))
    ticks = list(range(0, len(labels), step))
    texts = [_truncate(labels[tick], 40) for tick in ticks]
    # Width of the panel in inches, without the y tick labels and the color bar.
    width = axis.get_figure().get_figwidth() / axis.axes.get_gridspec().ncols - 1.6
    overlap = axis.axis_name == "x" and _CHAR_INCHES * max(map(len, texts), default=0) > width / max(len(texts), 1)
    axis.set_ticks(ticks, texts, fontsize=7, rotation=90 if overlap else 0)
    axis.set_tick_params(length=2, color="grey")
    axis.set_label_text(name)


def _max_tick_labels(labels: tuple[str, ...]) -> int:
    """Maximum number of tick labels of an axis with these labels."""
    return _MAX_INDEX_LABELS if labels == tuple(map(str, range(len(labels)))) else _MAX_TICK_LABELS


def _truncate(text: str, max_chars: int) -> str:
    text = show_whitespace(text)
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
