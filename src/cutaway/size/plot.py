"""Costs as a drawing: memory by part, and time against batch and context where a device is known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.config.transformer import Encoder
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate
from cutaway.size.options import MODE_LABELS
from cutaway.size.roofline import RooflineBound
from cutaway.size.units import GIB, format_si

if TYPE_CHECKING:  # matplotlib takes longer to load than every answer, and is loaded to draw
    from matplotlib.axes import Axes

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
LINE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", "-x", "-^", "-s")
"""Lines, and what tells those of the same color apart."""
COMPONENT_COLORS = {
    "weights": "#0072B2",
    "autocast weight copies": "#56B4E9",
    "optimizer": "#E69F00",
    "gradients": "#009E73",
    "kv cache": "#D55E00",
    "activations": "#CC79A7",
    "logits and loss": "#F0E442",
    "other": "#BBBBBB",
}
"""Okabe and Ito's colors, told apart by every kind of sight: of models, and of what is in memory."""
COMPONENT_GROUPS = {
    "temporary gradients": "gradients",
    "reduce-scatter buffers": "gradients",
    "all-gathered weights": "autocast weight copies",
}
COMPONENT_GROUPS |= {"logits": "logits and loss", "loss": "logits and loss", "workspace": "other"}
"""Parts that are drawn as one with others; what is not named here or above is an activation."""
TEXT_COLOR = "#333333"
MATPLOTLIB_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "cutaway",  # the same question draws the same file
    "text.parse_math": False,  # a name may have a dollar in it
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": TEXT_COLOR,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
}

NamedEstimates = tuple[str, Sequence[SizeEstimate]]
"""A model's name and its answers, one a mode."""


def plot_sizes(path: Path | str, estimates: Sequence[NamedEstimates]) -> Path:
    """Draw these answers into an .svg, .png or .pdf file."""
    path = Path(path)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"'{path}' is no drawing that can be written; end it in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"'{path}' cannot be written, for '{path.parent}' is no directory; make it first")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    timed = estimates[0][1][0].options.hardware is not None
    tall, below = 1.3 + 0.42 * sum(len(answers) for _, answers in estimates), 3.4 if timed else 0
    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=(9, 0.5 + tall + below), layout="constrained")
        figure.suptitle(_figure_title(estimates), x=0.01, ha="left", fontsize=10, color=TEXT_COLOR)
        if timed:  # two drawings, so that the legend of one takes no room from the other
            above, under = figure.subfigures(2, 1, squeeze=False, height_ratios=[tall, below])[:, 0]
            left, right = under.subplots(1, 2)
            _plot_throughput_by_batch_size(left, estimates)
            _plot_time_by_context(right, estimates)
        _plot_memory(above.subplots() if timed else figure.subplots(), estimates)
        undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=160, metadata=undated.get(path.suffix.lower()))
    return path


def _figure_title(estimates: Sequence[NamedEstimates]) -> str:
    """What is drawn, as a title."""
    names = ", ".join(dict.fromkeys(name for name, _ in estimates))
    answers = estimates[0][1]
    asked = answers[0].options
    dtypes = ", ".join(f"{each.options.precision.name} {MODE_LABELS[each.options.mode]}" for each in answers)
    contexts = sorted({each.options.context for _, several in estimates for each in several})
    context = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    where = f" · {asked.hardware.title}" if asked.hardware else ""
    where = (
        f" · {asked.world_size:,} ×{where[2:]} ({asked.parallel_dims})"
        if asked.hardware and asked.world_size > 1
        else where
    )
    return f"{names}\nbatch {asked.batch_size:,} · context {context} · {dtypes}{where}"


# ---------------------------------------------------------------------------------------- memory


def _plot_memory(axes: "Axes", estimates: Sequence[NamedEstimates]) -> None:
    """A bar a model and mode, stacked by part."""
    from matplotlib.patches import Patch

    answers = [(name, each) for name, several in estimates for each in several]
    stacks = [group_components(each.memory.peak_by_component) for _, each in answers]
    device = answers[0][1].options.hardware
    room = int(device.memory) if device is not None and device.memory is not None else 0
    widest = max(room, *(each.memory.total_bytes for _, each in answers))
    for row, (_, each) in enumerate(answers):
        start = 0.0
        for part, size in stacks[row].items():
            axes.barh(row, size / 1e9, left=start, height=0.62, color=COMPONENT_COLORS[part])
            start += size / 1e9
        over: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(
            start + widest / 1e11,
            row,
            format_si(each.memory.total_bytes, "B"),
            va="center",
            color=TEXT_COLOR,
            bbox=over,
            zorder=3,
        )
    if device is not None and device.memory is not None:
        axes.axvline(device.memory / 1e9, color=TEXT_COLOR, linewidth=1, linestyle="--")
        side = "right" if device.memory > 0.6 * widest else "left"
        text = f" {device.memory / GIB:,.4g} GiB of {device.title} "
        axes.text(device.memory / 1e9, -0.62, text, ha=side, va="center", fontsize=8, color=TEXT_COLOR)
    axes.set_xlim(0, 1.14 * widest / 1e9)
    axes.set_ylim(len(answers) - 0.5, -0.85)
    axes.set_yticks(range(len(answers)), [f"{name} {MODE_LABELS[each.options.mode]}" for name, each in answers])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GB (10⁹ bytes) on one device")
    axes.set_title("Memory at its fullest, by part")
    signs = [
        Patch(color=COMPONENT_COLORS[part], label=part)
        for part in COMPONENT_COLORS
        if any(stack[part] for stack in stacks)
    ]
    axes.legend(handles=signs, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1, handleheight=1)


def group_components(bytes_by_component: Mapping[str, int]) -> dict[str, int]:
    """A memory's parts as they are drawn."""
    drawn = dict.fromkeys(COMPONENT_COLORS, 0)
    for part, size in bytes_by_component.items():
        drawn[component_group(part)] += size
    return drawn


def component_group(component: str) -> str:
    return COMPONENT_GROUPS.get(component, component if component in COMPONENT_COLORS else "activations")


# ---------------------------------------------------------------------------------------- time


def _plot_throughput_by_batch_size(axes: "Axes", estimates: Sequence[NamedEstimates]) -> None:
    """Tokens a second at most, against the batch; dotted where the device's memory is full."""
    for index, ((name, answers), color) in enumerate(zip(estimates, cycle(LINE_COLORS), strict=False)):
        mark = LINE_STYLES[index // len(LINE_COLORS) % len(LINE_STYLES)]
        answer = answers[0]
        devices = answer.dp_size
        turn = answer.compute_bound_batch_size if answer.options.mode == "infer" else None
        largest = max(1024, 4 * (turn or 0), answer.batch_size_per_device)
        doublings = {2**power for power in range(largest.bit_length())}
        batches = [each * devices for each in sorted(doublings if turn is None else doublings | {turn})]
        points = [_with_options(answer, batch_size=batch) for batch in batches]
        most, slow, fast = zip(*(_throughput_range(point.time) for point in points), strict=True)
        full = sum(point.fits is not False for point in points)
        axes.plot(batches[:full], most[:full], mark, color=color, label=name, markersize=3)
        axes.plot(batches[max(0, full - 1) :], most[max(0, full - 1) :], ":", color=color)
        if len(estimates) == 1:
            axes.fill_between(batches, slow, fast, color=color, alpha=0.15, linewidth=0)
        if turn is not None:
            there = turn * devices, most[batches.index(turn * devices)]
            axes.plot(*there, "o", color=color, markersize=4)
            place: dict[str, Any] = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right"}
            axes.annotate(f"compute binds from {there[0]:,} on", there, fontsize=8, color=TEXT_COLOR, **place)
    first = estimates[0][1][0].options
    reads = {isinstance(answers[0].options.config, Encoder) for _, answers in estimates}
    serving = "serving" if len(reads) > 1 else "reading" if True in reads else "decoding"
    doing = "training" if first.mode == "train" else serving
    axes.set_title(f"Tokens a second when {doing}, at most")
    _format_log_axes(
        axes, "sequences at once (dotted: more than memory holds)", "tokens a second", legend=len(estimates) > 1
    )


def _plot_time_by_context(axes: "Axes", estimates: Sequence[NamedEstimates]) -> None:
    """Seconds at least, against the context."""
    colors = cycle(LINE_COLORS)
    for name, answers in estimates:
        answer, color = answers[0], next(colors)
        lengths = _context_grid(answer)
        points = [_with_context(answer, length) for length in lengths]
        if answer.options.mode == "train":
            lines = {"training step": [point.train_time for point in points]}
        else:
            lines = {"prefill": [point.prefill_time for point in points]}
            lines |= {"decode, a step": [point.decode_time for point in points]}
        for (what, bounds), dashes in zip(lines.items(), ("-", "--"), strict=False):
            known = [(length, each) for length, each in zip(lengths, bounds, strict=True) if each is not None]
            if not known:
                continue
            if len(estimates) == 1 and dashes == "--":
                color = next(colors)
            label = what if len(estimates) == 1 else f"{name}, {what}"
            along = [length for length, _ in known]
            axes.plot(along, [each.min_seconds for _, each in known], dashes, color=color, label=label)
            low, high = (
                [each.expected_seconds_low for _, each in known],
                [each.expected_seconds_high for _, each in known],
            )
            if len(estimates) == 1:
                axes.fill_between(along, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title("Time at least" + (" (shaded in both: expected)" if len(estimates) == 1 else ""))
    _format_log_axes(axes, "tokens of context", "seconds", legend=True)


def _context_grid(estimate: SizeEstimate) -> list[int]:
    """From a paragraph to the longest that the model is made for, or is asked about."""
    longest = max(estimate.options.context, estimate.options.config.context or 0)
    shortest = 7 if longest > 128 else 0  # a line needs two points
    between = {length for power in range(shortest, 24) if (length := 2**power) < longest}
    return sorted(between | {longest, max(2, longest)})


def _with_options(estimate: SizeEstimate, **changes: Any) -> SizeEstimate:
    return SizeEstimate(replace(estimate.options, **changes))


def _with_context(estimate: SizeEstimate, context: int) -> SizeEstimate:
    """An encoder-decoder's source grows along, unless its length was asked for."""
    follows = estimate.options.source_len == estimate.options.context
    return _with_options(estimate, context=context, source_len=context if follows else estimate.options.source_len)


def _throughput_range(bound: RooflineBound | None) -> tuple[float, float, float]:
    """Tokens a second at most, and those to expect."""
    assert bound is not None
    return (
        bound.max_tokens_per_second,
        bound.num_tokens / bound.expected_seconds_high,
        bound.num_tokens / bound.expected_seconds_low,
    )


def _format_log_axes(axes: "Axes", xlabel: str, ylabel: str, *, legend: bool) -> None:
    """Both axes logarithmic, in plain numbers: doublings along, tens up (and halves of tens, if there are few)."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    first, last = (round(end).bit_length() - 1 for end in axes.dataLim.intervalx)
    ticks = [2**power for power in range(first, last + 1, 1 + (last - first) // 7)]
    axes.set_xticks(ticks, [f"{tick:,}" if last < 24 else format_si(tick, digits=3).replace(" ", "") for tick in ticks])
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    if legend:
        axes.legend()
