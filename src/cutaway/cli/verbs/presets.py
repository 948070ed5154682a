"""`cutaway presets`: the models that have a name."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # --help needs no configurations, and --json draws no tables: each is imported where it is used
    from cutaway.config import Config


def presets(
    name: Annotated[str | None, typer.Argument(help="Show this preset's whole configuration.")] = None,
    form: Annotated[str | None, typer.Option(help="Only decoder, encoder or encoder-decoder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    as_schema: Annotated[
        bool, typer.Option("--schema", help="The JSON schema of a configuration, for editors.")
    ] = False,
) -> None:
    """List the models that have a name, or show one as a TOML file to start from.

    Example: cutaway presets llama-3-8b > mine.toml
    """
    from cutaway.config import config, schema, to_json, to_toml

    if as_schema:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    elif name is not None:
        sys.stdout.write(to_json(config(name)) if as_json else to_toml(config(name)))
    else:
        from cutaway.config import presets as names

        rows = [_preset_to_dict(each, config(each)) for each in names() if form in (None, config(each).form)]
        if not rows:
            raise InputError(f"--form '{form}' is no form; use decoder, encoder or encoder-decoder")
        sys.stdout.write(json.dumps(rows, indent=2) + "\n") if as_json else _render_presets(rows)


def _preset_to_dict(name: str, model: "Config") -> dict[str, str | int | None]:
    from cutaway.size.parameters import count_parameters

    *_, stack = model.stacks.values()
    attention = stack.block[0].attention
    params = count_parameters(model)
    return {
        "name": name,
        "form": model.form,
        "layers": sum(each.layers for each in model.stacks.values()),
        "d_model": model.d_model,
        "heads": attention.heads,
        "kv_heads": getattr(attention, "num_kv_heads", None),
        "vocab_size": model.vocab_size,
        "context": model.context,
        "num_parameters": params.total,
        "num_active_parameters": params.active,
    }


def _render_presets(rows: list[dict[str, str | int | None]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cutaway.size.units import format_count

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "form"):
        table.add_column(column, no_wrap=True)
    for column in ("layers", "d_model", "heads", "parameters", "active"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in rows:
        heads, groups = each["heads"], each["kv_heads"]
        table.add_row(
            str(each["name"]),
            str(each["form"]),
            str(each["layers"]),
            str(each["d_model"]),
            str(heads) if groups in (None, heads) else f"{heads}/{groups}",
            format_count(int(each["num_parameters"] or 0)),
            ""
            if each["num_active_parameters"] == each["num_parameters"]
            else format_count(int(each["num_active_parameters"] or 0)),
        )
    console = Console()
    console.print(table)
    console.print(
        f"[dim]{len(rows)} presets; heads as queries/keys where they differ; active: parameters a token uses.[/dim]"
    )
