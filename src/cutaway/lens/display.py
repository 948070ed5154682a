"""Text tables, HTML tables and heat maps of activations. matplotlib is imported only by `plot_heatmap`."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SiteRow = tuple[str, str, tuple[int, ...], float]
"""Site name, axes, shape, and a number, which is the size in bytes or the norm."""


def format_axes(axes: str, shape: tuple[int, ...]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))


def format_site_table(rows: Sequence[SiteRow]) -> str:
    """Format one line per site: name, shape with axis names, size in bytes."""
    if not rows:
        return "nothing recorded yet"
    name_width = max(len(name) for name, *_ in rows)
    shapes = [format_axes(axes, shape) for _, axes, shape, _ in rows]
    shape_width = max(map(len, shapes))
    lines = zip(rows, shapes, strict=True)
    return "\n".join(f"{row[0]:{name_width}}  {shape:{shape_width}}  {format_bytes(row[-1])}" for row, shape in lines)


def render_html_table(rows: Sequence[SiteRow]) -> str:
    """Render one row per site for notebooks: name, shape with axis names, norm."""
    body = ""
    for name, axes, shape, norm in rows:
        body += f"<tr><td><code>{escape(name)}</code></td><td>{escape(format_axes(axes, shape))}</td>"
        body += f"<td>{norm:.4g}</td></tr>"
    return f"<table><thead><tr><th>site</th><th>shape</th><th>norm</th></tr></thead><tbody>{body}</tbody></table>"


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def plot_heatmap(value: Tensor, title: str, axes: str, **plot_kwargs: Any) -> "Figure":
    """Plot a heat map: blue is positive, red is negative, darker is further from 0. Masked scores (−∞) are blank."""
    from matplotlib import pyplot

    values = value.float().cpu()
    pixels, finite = values.masked_fill(values.isinf(), float("nan")).numpy(), values[values.isfinite()]
    signed, top = bool((finite < 0).any()), float(finite.abs().max()) if len(finite) else 0.0
    limits = {"vmin": -top if signed else 0.0, "vmax": top or 1.0}
    figure, ax = pyplot.subplots(figsize=plot_kwargs.pop("figsize", (5, 3.6)), layout="constrained")
    colors = {"cmap": "RdBu" if signed else "Blues", "interpolation": "nearest"}
    image = ax.imshow(pixels, aspect="auto", **colors | limits | plot_kwargs)
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(axes[0])
    ax.set_xlabel(axes[-1])
    ax.locator_params(integer=True)
    figure.colorbar(image)
    pyplot.close(figure)
    return figure
