"""Pictures and tables of values; matplotlib is imported only when something is drawn."""

from collections.abc import Sequence
from html import escape
from typing import Any

from torch import Tensor

SiteRow = tuple[str, str, tuple[int, ...], float]


def _format_axes(axes: str, shape: tuple[int, ...]) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))


def format_site_table(rows: Sequence[SiteRow]) -> str:
    """A line a site: its name, its shape by named axes, its bytes."""
    if not rows:
        return "nothing yet"
    wide, broad = max(len(name) for name, *_ in rows), max(len(_format_axes(axes, shape)) for _, axes, shape, _ in rows)
    lines = [
        f"{name:{wide}}  {_format_axes(axes, shape):{broad}}  {format_bytes(size)}" for name, axes, shape, size in rows
    ]
    return "\n".join(lines)


def render_html_table(rows: Sequence[SiteRow]) -> str:
    """The same for a notebook, with the length of the vector."""
    cells = [(escape(name), escape(_format_axes(axes, shape)), f"{norm:.4g}") for name, axes, shape, norm in rows]
    body = "".join(
        f"<tr><td><code>{name}</code></td><td>{shape}</td><td>{norm}</td></tr>" for name, shape, norm in cells
    )
    return f"<table><thead><tr><th>site</th><th>shape</th><th>norm</th></tr></thead><tbody>{body}</tbody></table>"


def format_bytes(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"


def plot_heatmap(value: Tensor, title: str, axes: str, **plot_kwargs: Any) -> Any:
    """A heat map; darker is further from 0, blue above it and red below. What was masked is left blank."""
    from matplotlib import pyplot

    seen = value.float().cpu()
    shown, known = seen.masked_fill(seen.isinf(), float("nan")).numpy(), seen[seen.isfinite()]
    signed, top = bool((known < 0).any()), float(known.abs().max()) if len(known) else 0.0
    limits = {"vmin": -top if signed else 0.0, "vmax": top or 1.0}
    figure, ax = pyplot.subplots(figsize=plot_kwargs.pop("figsize", (5, 3.6)), layout="constrained")
    colours = {"cmap": "RdBu" if signed else "Blues", "interpolation": "nearest"}
    image = ax.imshow(shown, aspect="auto", **colours | limits | plot_kwargs)
    ax.set_title(title, fontsize=10)
    ax.set_ylabel(axes[0])
    ax.set_xlabel(axes[-1])
    ax.locator_params(integer=True)
    figure.colorbar(image)
    pyplot.close(figure)
    return figure
