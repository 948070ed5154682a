"""Plots of size estimates: memory by component and, for a device, throughput by batch size and time by context."""

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

if TYPE_CHECKING:  # at run time imported only to plot: importing matplotlib takes longer than an estimate
    from matplotlib.axes import Axes

_PLOT_SUFFIXES = (".svg", ".png", ".pdf")
LINE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINE_STYLES = ("-", "-x", "-^", "-s")
"""Line colors, and the styles that distinguish lines of the same color."""
_COMPONENT_COLORS = {
    "weights": "#0072B2",
    "autocast weight copies": "#56B4E9",
    "optimizer": "#E69F00",
    "gradients": "#009E73",
    "kv cache": "#D55E00",
    "activations": "#CC79A7",
    "logits and loss": "#F0E442",
    "other": "#BBBBBB",
}
"""The color-blind safe palette of Okabe and Ito, for models and for memory components."""
_COMPONENT_GROUPS = {
    "frozen weights": "weights",
    "adapters": "weights",
    "dequantized weights": "autocast weight copies",
    "float8 casts": "other",
    "temporary gradients": "gradients",
    "reduce-scatter buffers": "gradients",
    "all-gathered weights": "autocast weight copies",
    "logits": "logits and loss",
    "loss": "logits and loss",
    "workspace": "other",
}
"""Components that are plotted as part of another one. Components listed neither here nor above count as activations."""
TEXT_COLOR = "#333333"
MATPLOTLIB_STYLE: Any = {
    "svg.fonttype": "none",  # text as text, not as paths
    "svg.hashsalt": "cutaway",  # deterministic ids: equal options give equal files
    "text.parse_math": False,  # model names may contain a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": TEXT_COLOR,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 8,
}

_NamedEstimates = tuple[str, Sequence[SizeEstimate]]
"""A model name and its estimates, one per mode."""


def plot_sizes(path: Path | str, estimates: Sequence[_NamedEstimates]) -> Path:
    """Plot peak memory and, if a device is set, throughput and time to an .svg, .png or .pdf file; return its path."""
    path = Path(path)
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise InputError(f"the plot format of '{path}' is not supported; use the suffix .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"'{path}' cannot be written: '{path.parent}' is not a directory; create it first")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    has_time = estimates[0][1][0].options.hardware is not None
    memory_height, time_height = 1.3 + 0.42 * sum(len(several) for _, several in estimates), 3.4 if has_time else 0
    with rc_context(MATPLOTLIB_STYLE):
        figure = Figure(figsize=(9, 0.5 + memory_height + time_height), layout="constrained")
        figure.suptitle(_figure_title(estimates), x=0.01, ha="left", fontsize=10, color=TEXT_COLOR)
        if has_time:  # two subfigures, so that the memory legend does not shrink the time axes
            top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=[memory_height, time_height])[:, 0]
            left, right = bottom.subplots(1, 2)
            _plot_throughput_by_batch_size(left, estimates)
            _plot_time_by_context(right, estimates)
        _plot_memory(top.subplots() if has_time else figure.subplots(), estimates)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=160, metadata=metadata.get(path.suffix.lower()))
    return path


def _figure_title(estimates: Sequence[_NamedEstimates]) -> str:
    """Return the figure title: model names, batch size, context, dtypes and device."""
    names = ", ".join(dict.fromkeys(name for name, _ in estimates))
    first = estimates[0][1]
    options = first[0].options
    dtypes = ", ".join(f"{estimate.options.precision.name} {MODE_LABELS[estimate.options.mode]}" for estimate in first)
    contexts = sorted({estimate.options.context for _, several in estimates for estimate in several})
    context = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    device = ""
    if options.hardware is not None:
        several = options.world_size > 1
        count, dims = (f"{options.world_size:,} × ", f" ({options.parallel_dims})") if several else ("", "")
        device = f" · {count}{options.hardware.title}{dims}"
    return f"{names}\nbatch {options.batch_size:,} · context {context} · {dtypes}{device}"


# ---------------------------------------------------------------------------------------- memory


def _plot_memory(axes: "Axes", estimates: Sequence[_NamedEstimates]) -> None:
    """Plot the peak memory as one bar per model and mode, stacked by component."""
    from matplotlib.patches import Patch

    rows = [(name, estimate) for name, several in estimates for estimate in several]
    stacks = [group_components(estimate.memory.peak_by_component) for _, estimate in rows]
    device = rows[0][1].options.hardware
    capacity = int(device.memory) if device is not None and device.memory is not None else 0
    x_max = max(capacity, *(estimate.memory.total_bytes for _, estimate in rows))
    for row, (_, estimate) in enumerate(rows):
        start = 0.0
        for component, nbytes in stacks[row].items():
            axes.barh(row, nbytes / 1e9, left=start, height=0.62, color=_COMPONENT_COLORS[component])
            start += nbytes / 1e9
        text, x = format_si(estimate.memory.total_bytes, "B"), start + x_max / 1e11
        text_box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(x, row, text, va="center", color=TEXT_COLOR, bbox=text_box, zorder=3)
    if device is not None and device.memory is not None:
        axes.axvline(device.memory / 1e9, color=TEXT_COLOR, linewidth=1, linestyle="--")
        side = "right" if device.memory > 0.6 * x_max else "left"
        text = f" {device.memory / GIB:,.4g} GiB of {device.title} "
        axes.text(device.memory / 1e9, -0.62, text, ha=side, va="center", fontsize=8, color=TEXT_COLOR)
    axes.set_xlim(0, 1.14 * x_max / 1e9)
    axes.set_ylim(len(rows) - 0.5, -0.85)
    axes.set_yticks(range(len(rows)), [f"{name} {MODE_LABELS[estimate.options.mode]}" for name, estimate in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("GB (10⁹ bytes) per device")
    axes.set_title("Peak memory by component")
    shown = [component for component in _COMPONENT_COLORS if any(stack[component] for stack in stacks)]
    handles = [Patch(color=_COMPONENT_COLORS[component], label=component) for component in shown]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=1, handleheight=1)


def group_components(bytes_by_component: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each bar of the plot: the sum over the memory components that the bar combines."""
    grouped = dict.fromkeys(_COMPONENT_COLORS, 0)
    for component, nbytes in bytes_by_component.items():
        grouped[component_group(component)] += nbytes
    return grouped


def component_group(component: str) -> str:
    return _COMPONENT_GROUPS.get(component, component if component in _COMPONENT_COLORS else "activations")


# ---------------------------------------------------------------------------------------- time


def _plot_throughput_by_batch_size(axes: "Axes", estimates: Sequence[_NamedEstimates]) -> None:
    """Plot the maximum tokens per second by batch size, dotted where the device's memory is exceeded."""
    for index, ((name, several), color) in enumerate(zip(estimates, cycle(LINE_COLORS), strict=False)):
        style = LINE_STYLES[index // len(LINE_COLORS) % len(LINE_STYLES)]
        estimate = several[0]
        dp_size = estimate.dp_size
        crossover = estimate.compute_bound_batch_size if estimate.options.mode == "infer" else None
        largest = max(1024, 4 * (crossover or 0), estimate.batch_size_per_device)
        doublings = {2**power for power in range(largest.bit_length())}
        batch_sizes = [size * dp_size for size in sorted(doublings if crossover is None else doublings | {crossover})]
        points = [SizeEstimate(replace(estimate.options, batch_size=batch)) for batch in batch_sizes]
        fastest, slow, fast = zip(*(_throughput_range(point.time) for point in points), strict=True)
        num_fitting = sum(point.fits is not False for point in points)
        axes.plot(batch_sizes[:num_fitting], fastest[:num_fitting], style, color=color, label=name, markersize=3)
        axes.plot(batch_sizes[max(0, num_fitting - 1) :], fastest[max(0, num_fitting - 1) :], ":", color=color)
        if len(estimates) == 1:
            axes.fill_between(batch_sizes, slow, fast, color=color, alpha=0.15, linewidth=0)
        if crossover is not None:
            batch = crossover * dp_size
            end = batch, fastest[batch_sizes.index(batch)]
            axes.plot(*end, "o", color=color, markersize=4)
            text = f"compute-bound from {batch:,}"
            axes.annotate(text, end, (-8, 0), textcoords="offset points", ha="right", fontsize=8, color=TEXT_COLOR)
    first = estimates[0][1][0].options
    is_encoder = {isinstance(several[0].options.config, Encoder) for _, several in estimates}
    serving = "inference" if len(is_encoder) > 1 else "prefill" if True in is_encoder else "decode"
    activity = "training" if first.mode == "train" else serving
    axes.set_title(f"Maximum tokens per second: {activity}")
    _format_log_axes(axes, "batch size (dotted: exceeds memory)", "tokens per second", legend=len(estimates) > 1)


def _plot_time_by_context(axes: "Axes", estimates: Sequence[_NamedEstimates]) -> None:
    """Plot the minimum time of a training step, or of prefill and a decode step, by context length."""
    colors = cycle(LINE_COLORS)
    for name, several in estimates:
        estimate, color = several[0], next(colors)
        lengths = _context_grid(estimate)
        points = [_with_context(estimate, length) for length in lengths]
        if estimate.options.mode == "train":
            lines = {"training step": [point.train_time for point in points]}
        else:
            lines = {"prefill": [point.prefill_time for point in points]}
            lines |= {"decode step": [point.decode_time for point in points]}
        for (phase, bounds), style in zip(lines.items(), ("-", "--"), strict=False):
            known = [(length, bound) for length, bound in zip(lengths, bounds, strict=True) if bound is not None]
            if not known:
                continue
            if len(estimates) == 1 and style == "--":
                color = next(colors)
            label = phase if len(estimates) == 1 else f"{name}, {phase}"
            contexts = [length for length, _ in known]
            axes.plot(contexts, [bound.min_seconds for _, bound in known], style, color=color, label=label)
            if len(estimates) == 1:
                low = [bound.expected_seconds_low for _, bound in known]
                high = [bound.expected_seconds_high for _, bound in known]
                axes.fill_between(contexts, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title("Minimum time" + (" (shaded in both plots: expected)" if len(estimates) == 1 else ""))
    _format_log_axes(axes, "context (tokens)", "seconds", legend=True)


def _context_grid(estimate: SizeEstimate) -> list[int]:
    """List the context lengths to plot: powers of two from 128, and the longer of the model's and the given context."""
    longest = max(estimate.options.context, estimate.options.config.context or 0)
    shortest = 7 if longest > 128 else 0  # a short grid starts at 1, because a line needs two points
    between = {length for power in range(shortest, 24) if (length := 2**power) < longest}
    return sorted(between | {longest, max(2, longest)})


def _with_context(estimate: SizeEstimate, context: int) -> SizeEstimate:
    """Return the estimate for another context length. A source length that is equal to the old one changes too."""
    options = estimate.options
    source_len = context if options.source_len == options.context else options.source_len
    return SizeEstimate(replace(options, context=context, source_len=source_len))


def _throughput_range(bound: RooflineBound | None) -> tuple[float, float, float]:
    """Return (maximum, lower end of the expected range, upper end of the expected range) of the tokens per second."""
    assert bound is not None
    low, high = bound.num_tokens / bound.expected_seconds_high, bound.num_tokens / bound.expected_seconds_low
    return bound.max_tokens_per_second, low, high


def _format_log_axes(axes: "Axes", xlabel: str, ylabel: str, *, legend: bool) -> None:
    """Set log-log axes with plain tick labels: powers of two on x; powers of ten on y, or 1-2-5 over a short range."""
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
