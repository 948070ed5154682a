"""`cutaway presets`: list preset model configurations, or print one as TOML."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # imported where they are used: --help needs no configs, and --json no rich
    from cutaway.config import Config


def presets(
    name: Annotated[str | None, typer.Argument(help="Preset whose config is printed.")] = None,
    form: Annotated[str | None, typer.Option(help="List only this form: decoder, encoder or encoder-decoder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of model configs.")] = False,
) -> None:
    """List the preset model configs, or print one as TOML.

    Example: cutaway presets llama-3-8b > mine.toml
    """
    from cutaway.config import config, schema, to_json, to_toml

    if as_schema:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
    elif name is not None:
        sys.stdout.write(to_json(config(name)) if as_json else to_toml(config(name)))
    else:
        from cutaway.config import presets as list_presets

        rows = [
            _preset_to_dict(preset, config(preset)) for preset in list_presets() if form in (None, config(preset).form)
        ]
        if not rows:
            raise InputError(f"--form is '{form}'; use decoder, encoder or encoder-decoder")
        sys.stdout.write(json.dumps(rows, indent=2) + "\n") if as_json else _render_presets(rows)


def _preset_to_dict(name: str, model: "Config") -> dict[str, str | int | None]:
    from cutaway.size.parameters import count_parameters

    *_, stack = model.stacks.values()
    attention = stack.block[0].attention
    params = count_parameters(model)
    return {
        "name": name,
        "form": model.form,
        "layers": sum(stack_config.layers for stack_config in model.stacks.values()),
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
    for row in rows:
        heads, kv_heads = row["heads"], row["kv_heads"]
        table.add_row(
            str(row["name"]),
            str(row["form"]),
            str(row["layers"]),
            str(row["d_model"]),
            str(heads) if kv_heads in (None, heads) else f"{heads}/{kv_heads}",
            format_count(int(row["num_parameters"] or 0)),
            ""
            if row["num_active_parameters"] == row["num_parameters"]
            else format_count(int(row["num_active_parameters"] or 0)),
        )
    console = Console()
    console.print(table)
    console.print(
        f"[dim]{len(rows)} presets; heads as query/KV heads where they differ; active: parameters used per token.[/dim]"
    )
