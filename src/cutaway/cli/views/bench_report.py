"""Terminal report of `cutaway bench`: throughput against the hardware limit, and machine measurements."""

from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
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
    dtype = (
        measurement.dtype
        if measurement.weight_bits is None
        else f"{measurement.dtype} with {measurement.weight_bits}-bit weights"
    )
    parameters = f"{format_count(measurement.num_parameters, 3)} parameters"
    description = f"{parameters}, {dtype}, batch {measurement.batch_size:,}, context {measurement.context:,}"
    out.print(format_heading(source_name(source), description))
    out.print(Text(f"{'prefill' if is_prefill else 'decode'} on {measurement.device}", "dim"))
    table = borderless_table(
        "lrrrr", ["", "tokens/s", "ms" if is_prefill else "ms per step", "quartiles", "of the limit"]
    )
    for name, result in (("cutaway", measurement.cutaway), ("transformers", measurement.baseline)):
        if result is not None:
            quartile_range = "–".join(format_number(value * 1e3) for value in quartiles(result.seconds))
            fraction = f"{result.fraction_of_limit:.0%}" if result.fraction_of_limit >= 0.01 else "<1%"
            table.add_row(
                name,
                format_number(result.tokens_per_second),
                format_number(result.median_seconds * 1e3),
                quartile_range,
                fraction,
            )
    out.print(indent(table))
    if measurement.speedups:
        low, high = quartiles(measurement.speedups)
        out.print(f"{median(measurement.speedups):.2f} times as fast, paired runs (quartiles {low:.2f}–{high:.2f})")
    if is_prefill:
        rate = format_si(measurement.hardware_limit, "FLOP/s")
        limit = f"prefill takes {format_si(measurement.flops, 'FLOP')}; a matrix product on this device reaches {rate}"
    else:
        rate = format_si(measurement.hardware_limit, "B/s")
        limit = f"a decode step reads {format_si(measurement.min_bytes, 'B')}; a copy on this device reaches {rate}"
    lines = [
        limit,
        *([] if measurement.quantization_loss is None else [str(measurement.quantization_loss)]),
        *measurement.notes,
    ]
    out.print(Text("\n".join(lines), "dim"), soft_wrap=True)


def render_calibration(calibration: "MeasuredHardware") -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("copy", f"{calibration.bandwidth / 1e9:,.1f} GB/s")
    for dtype, rate in calibration.flops.items():
        table.add_row(f"matrix product in {dtype}", f"{rate / 1e12:,.3g} TFLOP/s")
    for work, fraction in calibration.efficiency.items():
        table.add_row(f"{calibration.model}: {work}", f"{fraction:.0%} of the bound")
    console = Console()
    console.print(f"[bold]{calibration.device}[/bold]")
    console.print(table)
