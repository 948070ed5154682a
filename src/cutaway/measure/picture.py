"""A reliability diagram: accuracy against confidence, with the diagonal that a calibrated model lies on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.measure.reliability import Calibration

RIGHT, SURE = "#4678c8", "#c8504a"
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 8}


def diagram(of: "Calibration") -> Any:
    """A figure, closed: it is shown where it is returned and leaves nothing open."""
    from matplotlib import pyplot

    width = 1 / len(of.counts)
    rows = of.bins
    middles = [(row["low"] + row["high"]) / 2 for row in rows]
    with pyplot.rc_context(STYLE):
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=(4, 4.6), sharex=True, layout="constrained", height_ratios=(3, 1)
        )
        above.plot((0, 1), (0, 1), color="grey", linewidth=0.8, linestyle="--", label="right as often as said")
        above.bar(middles, [row["accuracy"] for row in rows], 0.9 * width, color=RIGHT, label="right")
        above.plot(
            [row["confidence"] for row in rows],
            [row["accuracy"] for row in rows],
            "o",
            markersize=3,
            color=SURE,
            label="at the bin's mean confidence",
        )
        above.set(ylabel="share that was right", xlim=(0, 1), ylim=(0, 1))
        above.legend(frameon=False, fontsize=7, loc="upper left")
        below.bar(middles, [row["count"] for row in rows], 0.9 * width, color="#999999")
        below.set(ylabel="predictions", xlabel="confidence")
        figure.suptitle(f"calibration error {of.error:.3f} over {of.count:,} predictions", fontsize=10)
    pyplot.close(figure)
    return figure
