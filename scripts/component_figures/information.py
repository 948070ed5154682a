"""Figures of the concepts pages: entropy, cross-entropy, KL divergence and perplexity."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from component_figures.figure_style import BLUE, GREEN, ORANGE, TEXT_COLOR, FigureFn, make_figure
from cutaway.evaluate import cross_entropy, entropy, kl_divergence, perplexity

P, Q = (0.7, 0.2, 0.1), (0.5, 0.3, 0.2)


def plot_information() -> Figure:
    """Plot P and Q, and the bar of H(P, Q) as the sum of H(P) and KL(P ‖ Q), each with its perplexity."""
    figure, (left, right) = make_figure(2, width=7.6, height=2.6, width_ratios=(1, 2.2))
    for offset, name, distribution, color in ((-0.19, "P", P, BLUE), (0.19, "Q", Q, ORANGE)):
        bars = left.bar([i + offset for i in range(3)], distribution, width=0.36, color=color, label=name)
        left.bar_label(bars, fontsize=7.5, padding=1)
    left.set_xticks(range(3), ["a", "b", "c"])
    left.set(xlabel="outcome", ylabel="probability", ylim=(0, 0.85))
    left.legend(loc="upper right")
    draw_sum(right)
    return figure


def draw_sum(axis: Axes) -> None:
    """Draw H(P), KL(P ‖ Q) and H(P, Q) of P and Q as bars, so that the first two add up to the third."""
    bits = entropy(P), kl_divergence(P, Q), cross_entropy(P, Q)
    names = ("entropy\nH(P)", "KL divergence\nKL(P ‖ Q)", "cross-entropy\nH(P, Q)")
    notes = (
        f"2^H(P): perplexity {perplexity(P):.3f}",
        f"2^KL: ratio of perplexities {perplexity(P, Q) / perplexity(P):.3f}",
        f"2^H(P, Q): perplexity {perplexity(P, Q):.3f}",
    )
    axis.barh([0, 1], bits[:2], left=[0, bits[0]], color=[BLUE, GREEN], height=0.6)
    axis.barh([2, 2], bits[:2], left=[0, bits[0]], color=[BLUE, GREEN], height=0.6)
    axis.axvline(bits[0], color=TEXT_COLOR, lw=0.6, ls=":")
    for row, (value, note, end) in enumerate(zip(bits, notes, (bits[0], bits[2], bits[2]), strict=True)):
        axis.annotate(
            f"{value:.4f} bits\n{note}", (end, row), (5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(range(3), names)
    axis.invert_yaxis()
    axis.set(xlabel="bits", xlim=(0, 2.5))


FIGURES: dict[str, FigureFn] = {"information": plot_information}
