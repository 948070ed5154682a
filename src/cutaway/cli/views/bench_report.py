"""Terminal report of `cutaway bench`: throughput against the hardware limit, and machine measurements."""

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import borderless_table, build_console, format_heading, format_number, indent
from cutaway.size.units import format_count, format_si

if TYPE_CHECKING:
    from cutaway.bench.throughput import ThroughputResult
    from cutaway.size.measured_hardware import MeasuredHardware


def render_speed(source: str, measurement: "ThroughputResult") -> None:
    """Print the throughput of cutaway and transformers, and the hardware limit."""
    from cutaway.bench.throughput import quartiles
    from cutaway.cli.verbs.size import source_name

    is_prefill = measurement.phase == "prefill"
    out = build_console()
    bits = "" if measurement.weight_bits is None else f" with {measurement.weight_bits}-bit weights"
    weights = f"{format_count(measurement.num_parameters, 3)} parameters, {measurement.dtype}{bits}"
    description = f"{weights}, batch {measurement.batch_size:,}, context {measurement.context:,}"
    out.print(format_heading(source_name(source), description))
    out.print(Text(f"{measurement.phase} on {measurement.device}", "dim"))
    unit = "ms" if is_prefill else "ms per step"
    table = borderless_table("lrrrr", ["", "tokens/s", unit, "quartiles", "of the limit"])
    for name, result in (("cutaway", measurement.cutaway), ("transformers", measurement.baseline)):
        if result is not None:
            quartile_range = "–".join(format_number(value * 1e3) for value in quartiles(result.seconds))
            fraction = f"{result.fraction_of_limit:.0%}" if result.fraction_of_limit >= 0.01 else "<1%"
            rates = map(format_number, (result.tokens_per_second, result.median_seconds * 1e3))
            table.add_row(name, *rates, quartile_range, fraction)
    out.print(indent(table))
    if measurement.speedups:
        low, high = quartiles(measurement.speedups)
        speedup = f"{median(measurement.speedups):.2f} times as fast as transformers"
        out.print(f"{speedup}, in paired runs (quartiles {low:.2f}–{high:.2f})")
    work, rate = format_si(measurement.min_bytes, "B"), format_si(measurement.hardware_limit, "B/s")
    lines = [f"a decode step reads {work}; a copy on this device reaches {rate}"]
    if is_prefill:
        work, rate = format_si(measurement.flops, "FLOP"), format_si(measurement.hardware_limit, "FLOP/s")
        lines = [f"prefill takes {work}; a matrix product on this device reaches {rate}"]
    if measurement.quantization_loss is not None:
        lines.append(str(measurement.quantization_loss))
    out.print(Text("\n".join([*lines, *measurement.notes]), "dim"), soft_wrap=True)


def render_calibration(calibration: "MeasuredHardware") -> None:
    table = borderless_table("lr")
    table.add_row("copy", f"{calibration.bandwidth / 1e9:,.1f} GB/s")
    for dtype, rate in calibration.flops.items():
        table.add_row(f"matrix product in {dtype}", f"{rate / 1e12:,.3g} TFLOP/s")
    for work, fraction in calibration.efficiency.items():
        table.add_row(f"{calibration.model}: {work}", f"{fraction:.0%} of the bound")
    console = Console()
    console.print(f"[bold]{calibration.device}[/bold]")
    console.print(table)
