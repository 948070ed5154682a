"""What `cutaway train --dry-run` shows: what a rank holds and sends, counted and as size says it."""

import json
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.text import Text

from cutaway.cli.views.terminal import borderless_table, build_console, format_heading, indent
from cutaway.size.units import format_count, format_si
from cutaway.train.recipe.schema import Recipe

MEMORY_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "transient": "beside weights and optimizer, at most",
    "peak": "in all, at most",
}


def run_dry_run(recipe: Recipe, world_size: int, *, as_json: bool) -> None:
    from cutaway.train.trainer.dry_run import dry_run

    aside = Console(stderr=True)
    with aside.status("simulating a step") if aside.is_terminal and not as_json else nullcontext():
        told = dry_run(recipe, world_size).to_dict()
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        _render_dry_run(told)


def _render_dry_run(result: dict[str, Any]) -> None:
    out = build_console()
    places = " × ".join(f"{result[name]:,} {name}" for name in ("dp_replicate", "dp_shard", "tp"))
    parameters = f"{format_count(result['num_parameters'], 3)} parameters"
    out.print(format_heading("one rank", f"of {result['world_size']:,} ({places})", parameters))
    table = borderless_table("lrrr", ("bytes", "counted", "size says", "ratio"))
    for name, title in MEMORY_ROWS.items():
        of = result[name]
        ratio = "" if of["ratio"] is None else f"{of['ratio']:.3f}"
        table.add_row(title, format_si(of["measured_bytes"], "B"), format_si(of["predicted_bytes"], "B"), ratio)
    out.print(indent(table))
    if result["collectives"]:
        sent = borderless_table("lrrrr", ("collectives of a step", "counted", "bytes", "size says", "bytes"))
        for kind, of in result["collectives"].items():
            counts = (
                f"{of['count']:,}",
                format_si(of["bytes"], "B"),
                f"{of['predicted_count']:,}",
                format_si(of["predicted_bytes"], "B"),
            )
            sent.add_row(kind, *counts)
        out.print(indent(sent))
    out.print(
        Text(
            "Nothing was read, computed or written; collectives are counted by the whole that they give or take.", "dim"
        )
    )
