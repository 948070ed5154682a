"""Terminal report of `cutaway ablate`: variants, costs, measurements, findings."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cutaway.cli.views.terminal import borderless_table
from cutaway.size.units import format_count, format_si
from cutaway.train.ablate.metrics import METRICS

if TYPE_CHECKING:
    from cutaway.train.ablate.ablation import Ablation
    from cutaway.train.ablate.studies import Study


Results = dict[str, Any]
"""The contents of results.json."""


def render_ablation(results: Results, ablation: "Ablation") -> None:
    console = Console()
    console.print(_variants_table(results))
    console.print(_costs_table(results))
    if ablation.study is not None and ablation.study.columns:
        console.print(_measurements_table(results, ablation.study))
    console.print()
    for sentence in results["findings"]:
        console.print(Text(f"· {sentence}"), highlight=False)
    count, note = len(results["seeds"]), "one seed has no confidence interval; use --num-seeds 3 or more"
    if count > 1:
        note = f"± is the 95 % interval of the mean over {count} seeds; differences are paired by seed (same data)"
    console.print(Text(note, style="dim"))
    plots = ", ".join(sorted(path.name for path in ablation.output_dir.glob("*.svg")))
    console.print(Text(f"{ablation.output_dir}: results.json, {plots}", style="dim"))


def _format_metric(value: Results | None, metric: str) -> str:
    return "–" if value is None else METRICS[metric].format_interval(METRICS[metric].interval_from_dict(value))


def _variants_table(results: Results) -> Table:
    """Return a table of the final metric and the config changes of each variant."""
    metric = results["metric"]
    headers = ("variant", METRICS[metric].unit, "difference", "changed")
    table = borderless_table("LrrL", headers, title=f"\n{results['name']}, at equal {results['match']}")
    for row in results["variants"]:
        name = Text(row["variant"])
        if row["failed"]:
            name.append(f" ({row['failed']} of {len(results['seeds'])} failed)", style="red")
        difference = "" if row is results["variants"][0] else _format_metric(row["difference"], metric)
        table.add_row(name, _format_metric(row[metric], metric), difference, Text("\n".join(row["changes"]), "dim"))
    return table


def _costs_table(results: Results) -> Table:
    """Return a table of the parameters, FLOPs, tokens, time and memory of each variant."""
    headers = ("variant", "parameters", "FLOPs", "tokens", "seconds", "per step", "memory", "KV cache")
    table = borderless_table("Lrrrrrrr", headers, title="\ncosts")
    for row in results["variants"]:
        table.add_row(
            Text(row["variant"]),
            f"{row['parameters']:,}",
            format_count(row["flops"]),
            format_count(row["tokens"]),
            "–" if row["seconds"] is None else f"{row['seconds']['mean']:.1f}",
            "–" if row["step_seconds"] is None else f"{1e3 * row['step_seconds']['mean']:.1f} ms",
            "–" if row["peak_memory"] is None else format_si(row["peak_memory"], "B", 3),
            format_si(row["kv_cache_bytes_per_token"], "B", 3) if row["kv_cache_bytes_per_token"] else "–",
        )
    return table


def _measurements_table(results: Results, study: "Study") -> Table:
    by_variant = study.rows == "variants"
    headers = ["variant" if by_variant else results["variants"][0]["variant"]]
    headers += [f"{condition}{': ' if condition else ''}{METRICS[metric].title}" for condition, metric in study.columns]
    title = "\nmeasurements of the trained models"
    table = borderless_table("L" + "R" * len(study.columns), headers, title=title)
    rows_by_key = {(row["variant"], row["condition"], row["metric"]): row for row in results["measurements"]}

    def add_row(name: str, keys: list[tuple[str, str, str]]) -> None:
        table.add_row(Text(name), *(_format_metric(rows_by_key.get(key), key[-1]) for key in keys))

    names = [row["variant"] for row in results["variants"]]
    if by_variant:
        for name in names:
            add_row(name, [(name, condition, metric) for condition, metric in study.columns])
        return table
    for condition in dict.fromkeys(row["condition"] for row in results["measurements"] if row["variant"] == names[0]):
        add_row(condition, [(names[0], condition, metric) for _, metric in study.columns])
    return table
