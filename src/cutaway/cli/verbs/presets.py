"""`cutaway presets`: list preset model configurations, or print one as TOML."""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cutaway.cli.json_output import print_json
from cutaway.cli.options import JsonFlag, argument, option

if TYPE_CHECKING:  # imported where they are used: --help needs no configs, and --json no rich
    from cutaway.config import Config

Form = Literal["decoder", "encoder", "encoder-decoder"]


def presets(
    name: Annotated[str | None, argument("Preset whose config is printed.")] = None,
    form: Annotated[Form | None, option("List only this form.")] = None,
    as_json: JsonFlag = False,
    as_schema: Annotated[bool, option("Print the JSON schema of model configs.", "--schema")] = False,
) -> None:
    """List the preset model configs, or print one as TOML.

    Example: cutaway presets llama-3-8b > mine.toml
    """
    from cutaway.config import config, schema, to_json, to_toml

    if as_schema:
        print_json(schema())
    elif name is not None:
        sys.stdout.write(to_json(config(name)) if as_json else to_toml(config(name)))
    else:
        from cutaway.config import presets as list_presets

        rows = [_preset_to_dict(preset, config(preset)) for preset in list_presets()]
        rows = [row for row in rows if form in (None, row["form"])]
        if as_json:
            print_json(rows)
        else:
            _render_presets(rows)


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

    from cutaway.cli.views.terminal import borderless_table
    from cutaway.size.units import format_count

    table = borderless_table("llrrrrr", ["name", "form", "layers", "d_model", "heads", "parameters", "active"])
    for row in rows:
        heads, kv_heads = row["heads"], row["kv_heads"]
        head_counts = str(heads) if kv_heads in (None, heads) else f"{heads}/{kv_heads}"
        counts = int(row["num_parameters"] or 0), int(row["num_active_parameters"] or 0)
        active = "" if counts[0] == counts[1] else format_count(counts[1])
        shape = (str(row[name]) for name in ("name", "form", "layers", "d_model"))
        table.add_row(*shape, head_counts, format_count(counts[0]), active)
    console = Console()
    console.print(table)
    console.print(
        f"[dim]{len(rows)} presets; heads as query/KV heads where they differ; active: parameters used per token.[/dim]"
    )
