"""What `cutaway train --rehearse` shows: what a rank holds and sends, counted and as size says it."""

import json
import sys
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.text import Text

from cutaway.cli.size_view import console, grid, heading, under
from cutaway.size.units import short, si
from cutaway.train.recipe import Recipe

ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "beside": "beside weights and optimizer, at most",
    "peak": "in all, at most",
}


def show(recipe: Recipe, world: int, *, as_json: bool) -> None:
    from cutaway.train.rehearse import rehearse

    aside = Console(stderr=True)
    with aside.status("rehearsing a step") if aside.is_terminal and not as_json else nullcontext():
        told = rehearse(recipe, world).to_dict()
    if as_json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        draw(told)


def draw(told: dict[str, Any]) -> None:
    out = console()
    places = " × ".join(f"{told[name]:,} {name}" for name in ("copies", "shards", "tensor"))
    parameters = f"{short(told['parameters'], 3)} parameters"
    out.print(heading("one rank", f"of {told['world']:,} ({places})", parameters))
    table = grid("lrrr", ("bytes", "counted", "size says", "ratio"))
    for name, title in ROWS.items():
        of = told[name]
        ratio = "" if of["ratio"] is None else f"{of['ratio']:.3f}"
        table.add_row(title, si(of["bytes"], "B"), si(of["size"], "B"), ratio)
    out.print(under(table))
    if told["collectives"]:
        sent = grid("lrrrr", ("collectives of a step", "counted", "bytes", "size says", "bytes"))
        for kind, of in told["collectives"].items():
            counts = (f"{of['number']:,}", si(of["bytes"], "B"), f"{of['size_number']:,}", si(of["size_bytes"], "B"))
            sent.add_row(kind, *counts)
        out.print(under(sent))
    out.print(
        Text(
            "Nothing was read, computed or written; collectives are counted by the whole that they give or take.", "dim"
        )
    )
