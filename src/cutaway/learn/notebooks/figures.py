"""Figures of notebooks: find open figures, and save them as SVG files that do not depend on the date."""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cutaway",
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
}
"""Matplotlib settings for SVG files that are the same in every run."""


def open_figures(value: object = None) -> "list[Figure]":
    """Return the open pyplot figures, and `value`, the value of a cell, if it is another figure."""
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure

    opened = [plt.figure(number) for number in plt.get_fignums()]
    return opened + ([value] if isinstance(value, Figure) and value not in opened else [])


def render_svg(figure: "Figure") -> str:
    """Return a figure as the text of an SVG file."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(FIGURE_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return out.getvalue().decode()


def figure_title(figure: "Figure") -> str:
    texts = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next((text for text in texts if text), "figure").replace("\n", " ")
