"""What all drawings share: colours that are read on white and on black, and the shapes that come again."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba
from matplotlib.figure import Figure

import cutaway as ct

FigureFn = Callable[[], Figure]

CELL_PIXELS = 16
"""Points of a picture along the side of a square."""
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
    """A figure with its axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(axes[0])


def transparent_colormap(color: str) -> LinearSegmentedColormap:
    """From nothing to the colour: what is little is the page's own ground."""
    rgba = to_rgba(color)
    return LinearSegmentedColormap.from_list(color, [(*rgba[:3], 0.09), (*rgba[:3], 1.0)])


def diverging_colormap() -> LinearSegmentedColormap:
    """Below zero orange, above blue, zero nothing."""
    low, high = to_rgba(ORANGE)[:3], to_rgba(BLUE)[:3]
    return LinearSegmentedColormap.from_list("both", [(*low, 1.0), (*low, 0.03), (*high, 0.03), (*high, 1.0)])


def draw_matrix(axis: Axes, values: Any, color: str | LinearSegmentedColormap = BLUE, **limits: float) -> None:
    """A matrix as squares, its first row on top. One picture, for a path a square would be a hundred times as large."""
    ramp = transparent_colormap(color) if isinstance(color, str) else color
    grid = np.asarray(values, dtype=float)
    limits = {"vmin": np.nanmin(grid), "vmax": np.nanmax(grid)} | limits
    painted = ramp(Normalize(**limits)(np.nan_to_num(grid)))
    painted[np.isnan(grid)] = 0.0
    large = np.kron(painted, np.ones((CELL_PIXELS, CELL_PIXELS, 1)))
    for axis_of in (0, 1):  # a thin gap between squares
        edges = np.arange(0, large.shape[axis_of], CELL_PIXELS)
        large[(edges, slice(None), 3) if axis_of == 0 else (slice(None), edges, 3)] *= 0.3
    axis.imshow(large, extent=(0, grid.shape[1], grid.shape[0], 0), interpolation="none", aspect="equal")


def hide_axes(axis: Axes, *, x: str = "", y: str = "", title: str = "") -> None:
    """Squares without numbers along the sides."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set(xlabel=x, ylabel=y, title=title)
    for side in axis.spines.values():
        side.set_visible(False)


def label_cells(axis: Axes, columns: Sequence[str] = (), rows: Sequence[str] = (), *, rotated: bool = False) -> None:
    """Words at the middle of each column and row of squares."""
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
    """Lying bars with their numbers."""
    axis.barh(list(names), list(values), color=[COLORS[i % len(COLORS)] for i in range(len(names))], height=0.62)
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    for place, value in enumerate(values):
        axis.annotate(
            format_spec.format(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axis.margins(x=0.2)


def decoder_config(d_model: int = 64, layers: int = 2, heads: int = 4, vocab: int = 256, **parts: Any) -> Any:
    """A small decoder, as data: `attention`, `ffn` go into its block, the rest beside it."""
    block = {"attention": {"heads": heads, **parts.pop("attention", {})}}
    block |= {"ffn": parts.pop("ffn")} if "ffn" in parts else {}
    outer = {name: parts.pop(name) for name in ("init", "head") if name in parts}
    stack = {"layers": layers, "block": block, **parts}
    return ct.config({"form": "decoder", "vocab_size": vocab, "d_model": d_model, "decoder": stack, **outer})
