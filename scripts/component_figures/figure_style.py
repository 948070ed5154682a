"""Shared figure style and helpers. The colors are legible on light and dark backgrounds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.figure import Figure

import cutaway as ct

FigureFn = Callable[[], Figure]

CELL_PIXELS = 16
"""Pixels per side of a matrix cell."""
TEXT_COLOR = "#7f868f"
BLUE, ORANGE, GREEN, PURPLE, RED = "#3a8fd0", "#d98324", "#2f9e83", "#a56cc1", "#cf5c5c"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, "#8d8d4a", TEXT_COLOR)
MATPLOTLIB_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cutaway",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.dpi": 100,
    "lines.linewidth": 1.8,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor"), TEXT_COLOR
    ),
}


def make_figure(
    columns: int = 1, *, width: float = 6.4, height: float = 2.9, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure with `columns` axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(axes[0])


def transparent_colormap(color: str) -> LinearSegmentedColormap:
    """Return a colormap from nearly transparent to `color`."""
    rgba = to_rgba(color)
    return LinearSegmentedColormap.from_list(color, [(*rgba[:3], 0.09), (*rgba[:3], 1.0)])


def diverging_colormap() -> LinearSegmentedColormap:
    """Return a colormap from orange (negative) through transparent to blue (positive)."""
    low, high = to_rgba(ORANGE)[:3], to_rgba(BLUE)[:3]
    return LinearSegmentedColormap.from_list("both", [(*low, 1.0), (*low, 0.03), (*high, 0.03), (*high, 1.0)])


def draw_matrix(axis: Axes, values: Any, color: str | LinearSegmentedColormap = BLUE, **limits: float) -> None:
    """Draw a matrix as a grid of colored cells, with the first row on top.

    The cells are one raster image, because an SVG with a path per cell would be 100 times as large.
    """
    colormap = transparent_colormap(color) if isinstance(color, str) else color
    grid = np.asarray(values, dtype=float)
    limits = {"vmin": np.nanmin(grid), "vmax": np.nanmax(grid)} | limits
    colors = colormap(Normalize(**limits)(np.nan_to_num(grid)))
    colors[np.isnan(grid)] = 0.0
    pixels = np.kron(colors, np.ones((CELL_PIXELS, CELL_PIXELS, 1)))
    for dimension in (0, 1):  # thin gaps between cells
        edges = np.arange(0, pixels.shape[dimension], CELL_PIXELS)
        pixels[(edges, slice(None), 3) if dimension == 0 else (slice(None), edges, 3)] *= 0.3
    axis.imshow(pixels, extent=(0, grid.shape[1], grid.shape[0], 0), interpolation="none", aspect="equal")


def hide_axes(axis: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Hide ticks and spines, and set labels and title."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set(xlabel=x, ylabel=y, title=title)
    for side in axis.spines.values():
        side.set_visible(False)


def label_cells(axis: Axes, columns: Sequence[str] = (), rows: Sequence[str] = (), *, rotated: bool = False) -> None:
    """Label the columns and rows of cells."""
    if columns:
        axis.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90 if rotated else 0)
    if rows:
        axis.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def draw_bars(
    axis: Axes, names: Sequence[str], values: Sequence[float], *, unit: str, format_spec: str = "{:,.0f}"
) -> None:
    """Draw horizontal bars with their values."""
    axis.barh(list(names), list(values), color=[COLORS[i % len(COLORS)] for i in range(len(names))], height=0.62)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    for index, value in enumerate(values):
        axis.annotate(
            format_spec.format(value), (value, index), (4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axis.margins(x=0.2)


def decoder_config(d_model: int = 64, layers: int = 2, heads: int = 4, vocab: int = 256, **fields: Any) -> Any:
    """Return the configuration of a small decoder.

    `attention` and `ffn` in `fields` are set on the block, all other fields on the stack or the model.
    """
    block = {"attention": {"heads": heads, **fields.pop("attention", {})}}
    block |= {"ffn": fields.pop("ffn")} if "ffn" in fields else {}
    model_fields = {name: fields.pop(name) for name in ("init", "head") if name in fields}
    stack = {"layers": layers, "block": block, **fields}
    return ct.config({"form": "decoder", "vocab_size": vocab, "d_model": d_model, "decoder": stack, **model_fields})
