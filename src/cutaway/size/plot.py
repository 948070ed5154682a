"""Costs as a drawing: memory by part, and time against batch and context where a device is known."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.config.transformer import Encoder
from cutaway.errors import InputError
from cutaway.size.question import DOING
from cutaway.size.roofline import Bound
from cutaway.size.sizing import Size
from cutaway.size.units import GIB, si

if TYPE_CHECKING:  # matplotlib takes longer to load than every answer, and is loaded to draw
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png", ".pdf")
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = ("-", "-x", "-^", "-s")
"""Lines, and what tells those of the same colour apart."""
PARTS = {
    "weights": "#0072B2",
    "weights in bf16": "#56B4E9",
    "optimizer": "#E69F00",
    "gradients": "#009E73",
    "kv cache": "#D55E00",
    "activations": "#CC79A7",
    "logits and loss": "#F0E442",
    "other": "#BBBBBB",
}
"""Okabe and Ito's colours, told apart by every kind of sight: of models, and of what is in memory."""
WITHIN = {"gradients on the way": "gradients", "gradients to send": "gradients", "gathered weights": "weights in bf16"}
WITHIN |= {"logits": "logits and loss", "loss": "logits and loss", "workspace": "other"}
"""Parts that are drawn as one with others; what is not named here or above is an activation."""
INK = "#333333"
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "cutaway",  # the same question draws the same file
    "text.parse_math": False,  # a name may have a dollar in it
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
}

Named = tuple[str, Sequence[Size]]
"""A model's name and its answers, one a mode."""


def plot(path: Path | str, sizes: Sequence[Named]) -> Path:
    """Draw these answers into an .svg, .png or .pdf file."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"'{path}' is no drawing that can be written; end it in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"'{path}' cannot be written, for '{path.parent}' is no directory; make it first")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    timed = sizes[0][1][0].question.hardware is not None
    tall, below = 1.3 + 0.42 * sum(len(answers) for _, answers in sizes), 3.4 if timed else 0
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 0.5 + tall + below), layout="constrained")
        figure.suptitle(question(sizes), x=0.01, ha="left", fontsize=10, color=INK)
        if timed:  # two drawings, so that the legend of one takes no room from the other
            above, under = figure.subfigures(2, 1, squeeze=False, height_ratios=[tall, below])[:, 0]
            left, right = under.subplots(1, 2)
            draw_batch(left, sizes)
            draw_context(right, sizes)
        draw_memory(above.subplots() if timed else figure.subplots(), sizes)
        undated: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=160, metadata=undated.get(path.suffix.lower()))
    return path


def question(sizes: Sequence[Named]) -> str:
    """What is drawn, as a title."""
    names = ", ".join(dict.fromkeys(name for name, _ in sizes))
    answers = sizes[0][1]
    asked = answers[0].question
    dtypes = ", ".join(f"{each.question.dtype.name} {DOING[each.question.mode]}" for each in answers)
    contexts = sorted({each.question.context for _, several in sizes for each in several})
    context = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    where = f" · {asked.hardware.title}" if asked.hardware else ""
    where = f" · {asked.gpus:,} ×{where[2:]} ({asked.devices})" if asked.hardware and asked.gpus > 1 else where
    return f"{names}\nbatch {asked.batch:,} · context {context} · {dtypes}{where}"


# ---------------------------------------------------------------------------------------- memory


def draw_memory(axes: "Axes", sizes: Sequence[Named]) -> None:
    """A bar a model and mode, stacked by part."""
    from matplotlib.patches import Patch

    answers = [(name, each) for name, several in sizes for each in several]
    stacks = [grouped(each.memory.parts) for _, each in answers]
    device = answers[0][1].question.hardware
    room = int(device.memory) if device is not None and device.memory is not None else 0
    widest = max(room, *(each.memory.total for _, each in answers))
    for row, (_, each) in enumerate(answers):
        start = 0.0
        for part, size in stacks[row].items():
            axes.barh(row, size / 1e9, left=start, height=0.62, color=PARTS[part])
            start += size / 1e9
        over: Any = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(start + widest / 1e11, row, si(each.memory.total, "B"), va="center", color=INK, bbox=over, zorder=3)
    if device is not None and device.memory is not None:
        axes.axvline(device.memory / 1e9, color=INK, linewidth=1, linestyle="--")
        side = "right" if device.memory > 0.6 * widest else "left"
        text = f" {device.memory / GIB:,.4g} GiB of {device.title} "
        axes.text(device.memory / 1e9, -0.62, text, ha=side, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.14 * widest / 1e9)
    axes.set_ylim(len(answers) - 0.5, -0.85)
    axes.set_yticks(range(len(answers)), [f"{name} {DOING[each.question.mode]}" for name, each in answers])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GB (10⁹ bytes) on one device")
    axes.set_title("Memory at its fullest, by part")
    signs = [Patch(color=PARTS[part], label=part) for part in PARTS if any(stack[part] for stack in stacks)]
    axes.legend(handles=signs, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1, handleheight=1)


def grouped(parts: Mapping[str, int]) -> dict[str, int]:
    """A memory's parts as they are drawn."""
    drawn = dict.fromkeys(PARTS, 0)
    for part, size in parts.items():
        drawn[group(part)] += size
    return drawn


def group(part: str) -> str:
    return WITHIN.get(part, part if part in PARTS else "activations")


# ---------------------------------------------------------------------------------------- time


def draw_batch(axes: "Axes", sizes: Sequence[Named]) -> None:
    """Tokens a second at most, against the batch; dotted where the device's memory is full."""
    for index, ((name, answers), colour) in enumerate(zip(sizes, cycle(LINES), strict=False)):
        mark = MARKS[index // len(LINES) % len(MARKS)]
        answer = answers[0]
        devices = answer.replicas
        turn = answer.turning_batch if answer.question.mode == "infer" else None
        largest = max(1024, 4 * (turn or 0), answer.batch)
        doublings = {2**power for power in range(largest.bit_length())}
        batches = [each * devices for each in sorted(doublings if turn is None else doublings | {turn})]
        points = [asked(answer, batch=batch) for batch in batches]
        most, slow, fast = zip(*(rate(point.time) for point in points), strict=True)
        full = sum(point.fits is not False for point in points)
        axes.plot(batches[:full], most[:full], mark, color=colour, label=name, markersize=3)
        axes.plot(batches[max(0, full - 1) :], most[max(0, full - 1) :], ":", color=colour)
        if len(sizes) == 1:
            axes.fill_between(batches, slow, fast, color=colour, alpha=0.15, linewidth=0)
        if turn is not None:
            there = turn * devices, most[batches.index(turn * devices)]
            axes.plot(*there, "o", color=colour, markersize=4)
            place: dict[str, Any] = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right"}
            axes.annotate(f"compute binds from {there[0]:,} on", there, fontsize=8, color=INK, **place)
    first = sizes[0][1][0].question
    reads = {isinstance(answers[0].question.config, Encoder) for _, answers in sizes}
    serving = "serving" if len(reads) > 1 else "reading" if True in reads else "decoding"
    doing = "training" if first.mode == "train" else serving
    axes.set_title(f"Tokens a second when {doing}, at most")
    finish(axes, "sequences at once (dotted: more than memory holds)", "tokens a second", legend=len(sizes) > 1)


def draw_context(axes: "Axes", sizes: Sequence[Named]) -> None:
    """Seconds at least, against the context."""
    colours = cycle(LINES)
    for name, answers in sizes:
        answer, colour = answers[0], next(colours)
        lengths = contexts_of(answer)
        points = [at_length(answer, length) for length in lengths]
        if answer.question.mode == "train":
            lines = {"training step": [point.train_time for point in points]}
        else:
            lines = {"prefill": [point.prefill_time for point in points]}
            lines |= {"decode, a step": [point.decode_time for point in points]}
        for (what, bounds), dashes in zip(lines.items(), ("-", "--"), strict=False):
            known = [(length, each) for length, each in zip(lengths, bounds, strict=True) if each is not None]
            if not known:
                continue
            if len(sizes) == 1 and dashes == "--":
                colour = next(colours)
            label = what if len(sizes) == 1 else f"{name}, {what}"
            along = [length for length, _ in known]
            axes.plot(along, [each.seconds for _, each in known], dashes, color=colour, label=label)
            low, high = [each.fastest for _, each in known], [each.slowest for _, each in known]
            if len(sizes) == 1:
                axes.fill_between(along, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_title("Time at least" + (" (shaded in both: expected)" if len(sizes) == 1 else ""))
    finish(axes, "tokens of context", "seconds", legend=True)


def contexts_of(answer: Size) -> list[int]:
    """From a paragraph to the longest that the model is made for, or is asked about."""
    longest = max(answer.question.context, answer.question.config.context or 0)
    shortest = 7 if longest > 128 else 0  # a line needs two points
    between = {length for power in range(shortest, 24) if (length := 2**power) < longest}
    return sorted(between | {longest, max(2, longest)})


def asked(answer: Size, **change: Any) -> Size:
    return Size(replace(answer.question, **change))


def at_length(answer: Size, length: int) -> Size:
    """An encoder-decoder's source grows along, unless its length was asked for."""
    follows = answer.question.source == answer.question.context
    return asked(answer, context=length, source=length if follows else answer.question.source)


def rate(bound: Bound | None) -> tuple[float, float, float]:
    """Tokens a second at most, and those to expect."""
    assert bound is not None
    return bound.tokens_per_second, bound.tokens / bound.slowest, bound.tokens / bound.fastest


def finish(axes: "Axes", along: str, up: str, *, legend: bool) -> None:
    """Both axes logarithmic, in plain numbers: doublings along, tens up (and halves of tens, if there are few)."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    first, last = (round(end).bit_length() - 1 for end in axes.dataLim.intervalx)
    ticks = [2**power for power in range(first, last + 1, 1 + (last - first) // 7)]
    axes.set_xticks(ticks, [f"{tick:,}" if last < 24 else si(tick, digits=3).replace(" ", "") for tick in ticks])
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 60 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(along)
    axes.set_ylabel(up)
    axes.grid(True, which="major", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)
    if legend:
        axes.legend()
