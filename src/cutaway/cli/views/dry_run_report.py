"""Terminal report of `cutaway train --dry-run`: memory and collectives of a rank, measured and predicted."""

from typing import Any

from rich.text import Text

from cutaway.cli.json_output import print_json
from cutaway.cli.views.terminal import borderless_table, build_console, format_heading, indent, spinner
from cutaway.size.units import format_count, format_si
from cutaway.train.recipe.schema import Recipe

MEMORY_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "transient": "peak minus weights and optimizer",
    "peak": "peak",
}


def run_dry_run(recipe: Recipe, world_size: int, *, as_json: bool) -> None:
    from cutaway.train.trainer.dry_run import dry_run

    with spinner("simulating a step", quiet=as_json):
        result = dry_run(recipe, world_size).to_dict()
    if as_json:
        print_json(result)
    else:
        _render_dry_run(result)


def _render_dry_run(result: dict[str, Any]) -> None:
    out = build_console()
    mesh = " × ".join(f"{result[name]:,} {name}" for name in ("dp_replicate", "dp_shard", "tp"))
    parameters = f"{format_count(result['num_parameters'], 3)} parameters"
    out.print(format_heading("one rank", f"of {result['world_size']:,} ({mesh})", parameters))
    table = borderless_table("lrrr", ("bytes", "measured", "predicted", "ratio"))
    for name, title in MEMORY_ROWS.items():
        entry = result[name]
        ratio = "" if entry["ratio"] is None else f"{entry['ratio']:.3f}"
        table.add_row(title, format_si(entry["measured_bytes"], "B"), format_si(entry["predicted_bytes"], "B"), ratio)
    out.print(indent(table))
    if result["collectives"]:
        table = borderless_table("lrrrr", ("collectives per step", "measured", "bytes", "predicted", "bytes"))
        for kind, entry in result["collectives"].items():
            sizes = [format_si(entry[name], "B") for name in ("bytes", "predicted_bytes")]
            table.add_row(kind, f"{entry['count']:,}", sizes[0], f"{entry['predicted_count']:,}", sizes[1])
        out.print(indent(table))
    note = "No data was read, computed or written. The bytes of a collective are the size of its full tensor."
    out.print(Text(note, "dim"))
