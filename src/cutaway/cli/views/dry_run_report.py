"""Terminal report of `cutaway train --dry-run`: memory and collectives of a rank; the plan of a fine-tuning run."""

import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from cutaway.cli.json_output import print_json
from cutaway.cli.views.terminal import (
    borderless_table,
    build_console,
    escape_control_characters,
    format_heading,
    indent,
    spinner,
)
from cutaway.size.units import format_count, format_si
from cutaway.train.recipe.schema import PretrainedModelConfig, Recipe

if TYPE_CHECKING:
    from cutaway.train.trainer.fine_tuning_plan import FineTuningPlan

MEMORY_ROWS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "transient": "peak minus weights and optimizer",
    "peak": "peak",
}


def run_dry_run(recipe: Recipe, world_size: int, device: str | None, *, as_json: bool) -> None:
    if world_size == 1 and isinstance(recipe.model, PretrainedModelConfig):
        _run_plan(recipe, device, as_json=as_json)
        return
    from cutaway.train.trainer.dry_run import dry_run

    with spinner("simulating a step", quiet=as_json):
        result = dry_run(recipe, world_size).to_dict()
    if as_json:
        print_json(result)
    else:
        _render_dry_run(result)


def _run_plan(recipe: Recipe, device: str | None, *, as_json: bool) -> None:
    """Print the plan of a fine-tuning run. Exit with code 1 if the run would be refused."""
    from cutaway.cli.model_loading import default_device
    from cutaway.train.trainer.fine_tuning_plan import plan_fine_tuning

    with spinner("reading the data", quiet=as_json):
        plan = plan_fine_tuning(recipe, default_device(device))
    if as_json:
        print_json(plan.to_dict())
    else:
        _render_plan(plan)
    if plan.problem is not None:
        raise typer.Exit(1)


def _render_plan(plan: "FineTuningPlan") -> None:
    out = build_console()
    out.print(format_heading("dry run", f"objective {plan.objective} on {plan.checkpoint}"))
    trained, frozen = (format_count(count, 3) for count in (plan.num_trained_parameters, plan.num_frozen_parameters))
    table = borderless_table("lL")
    table.add_row(
        "parameters", f"{trained} trained, {frozen} frozen" if plan.num_frozen_parameters else f"{trained} trained"
    )
    data = plan.data or {}
    if "num_records" in data:
        counts = f"{data['num_records']:,} training and {data['num_validation_records']:,} validation records"
        tokens = f"; {data['num_tokens']:,} tokens per epoch" if "num_tokens" in data else ""
        table.add_row("data", f"{counts}{tokens}; longest record {data['longest_record']:,} tokens")
    else:
        table.add_row("data", "texts, which are tokenized when the run starts")
    steps = "known when the texts are tokenized" if plan.max_steps is None else f"{plan.max_steps:,}"
    table.add_row("steps", f"{steps}, in batches of {plan.batch_size:,}")
    free = "" if plan.free_bytes is None else f" of {format_si(plan.free_bytes, 'B')} free"
    table.add_row("memory", f"{format_si(plan.memory_bytes, 'B')} per step{free} on {plan.device}, in {plan.precision}")
    for name, size in plan.memory_by_component.items():
        if size:
            table.add_row("", f"{name} {format_si(size, 'B')}")
    out.print(indent(table))
    for message in plan.messages:
        out.print(Text(escape_control_characters(message)))
    out.print(Text("Nothing was trained or written.", "dim"))
    if plan.problem is not None:
        sys.stderr.write(f"the run would be refused: {plan.problem}\n")


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
