"""What an ablation found, for people: a table of variants, one of readings, and sentences."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cutaway.size.units import short, si
from cutaway.train.ablate.metrics import METRICS

if TYPE_CHECKING:
    from cutaway.train.ablate.ablation import Ablation
    from cutaway.train.ablate.studies import Study


def show(data: dict[str, Any], asked: "Ablation") -> None:
    console = Console()
    console.print(variants(data))
    console.print(costs(data))
    if asked.study is not None and asked.study.columns:
        console.print(readings(data, asked.study))
    console.print()
    for sentence in data["findings"]:
        console.print(Text(f"· {sentence}"), highlight=False)
    count = len(data["seeds"])
    note = f"± is 95 % of the mean over {count} seeds; differences are seed by seed, on the same data in the same order"
    console.print(Text(note if count > 1 else "one seed gives no interval; use --seeds 3 or more", style="dim"))
    drawings = ", ".join(sorted(path.name for path in asked.out.glob("*.svg")))
    console.print(Text(f"{asked.out}: results.json, {drawings}", style="dim"))


def written(found: dict[str, Any] | None, metric: str) -> str:
    return "–" if found is None else METRICS[metric].written(METRICS[metric].interval(found))


def variants(data: dict[str, Any]) -> Table:
    """Where each came to, and what was changed for it."""
    metric = data["metric"]
    table = titled(f"{data['name']}, at equal {data['equal']}")
    table.add_column("variant")
    table.add_column(METRICS[metric].unit, justify="right", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("changed", style="dim", overflow="fold")
    for row in data["variants"]:
        name = Text(row["variant"])
        if row["failed"]:
            name.append(f" ({row['failed']} of {len(data['seeds'])} came to no end)", style="red")
        difference = "" if row is data["variants"][0] else written(row["difference"], metric)
        table.add_row(name, written(row[metric], metric), difference, Text("\n".join(row["changed"])))
    return table


def costs(data: dict[str, Any]) -> Table:
    """What each took, so that what is not equal is seen."""
    table = titled("what it took")
    table.add_column("variant")
    for title in ("parameters", "FLOPs", "tokens", "seconds", "a step", "memory", "cache"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in data["variants"]:
        table.add_row(
            Text(row["variant"]),
            f"{row['parameters']:,}",
            short(row["flops"]),
            short(row["tokens"]),
            "–" if row["seconds"] is None else f"{row['seconds']['mean']:.1f}",
            "–" if row["step_seconds"] is None else f"{1e3 * row['step_seconds']['mean']:.1f} ms",
            "–" if row["memory"] is None else si(row["memory"], "B", 3),
            si(row["cache"], "B", 3) if row["cache"] else "–",
        )
    return table


def titled(title: str) -> Table:
    return Table(box=None, title=f"\n{title}", title_justify="left", pad_edge=False)


def readings(data: dict[str, Any], study: "Study") -> Table:
    by_variant = study.rows == "variants"
    table = titled("measured of the trained models")
    table.add_column("variant" if by_variant else data["variants"][0]["variant"])
    for what, metric in study.columns:
        table.add_column(f"{what}: {METRICS[metric].title}" if what else METRICS[metric].title, justify="right")
    found = {(row["variant"], row["what"], row["metric"]): row for row in data["readings"]}

    def cell(variant: str, what: str, metric: str) -> str:
        row = found.get((variant, what, metric))
        return written(row, metric)

    if by_variant:
        for row in data["variants"]:
            name = row["variant"]
            table.add_row(Text(name), *(cell(name, what, metric) for what, metric in study.columns))
        return table
    first = data["variants"][0]["variant"]
    for what in dict.fromkeys(row["what"] for row in data["readings"] if row["variant"] == first):
        table.add_row(Text(what), *(cell(first, what, metric) for _, metric in study.columns))
    return table
