"""Text tables and HTML tables of activations."""

from collections.abc import Sequence
from html import escape

from cutaway.size.units import format_si

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
    return "\n".join(
        f"{row[0]:{name_width}}  {shape:{shape_width}}  {format_si(row[-1], 'B', 3)}" for row, shape in lines
    )


def render_html_table(rows: Sequence[SiteRow]) -> str:
    """Render one row per site for notebooks: name, shape with axis names, norm."""
    body = ""
    for name, axes, shape, norm in rows:
        body += f"<tr><td><code>{escape(name)}</code></td><td>{escape(format_axes(axes, shape))}</td>"
        body += f"<td>{norm:.4g}</td></tr>"
    return f"<table><thead><tr><th>site</th><th>shape</th><th>norm</th></tr></thead><tbody>{body}</tbody></table>"
