"""`cutaway train`: train a model with a recipe or on a text, resume a run, print its status, or simulate a step."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from cutaway.cli.json_output import print_json
from cutaway.cli.options import Device, Overrides, argument, json_flag, option
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.train.recipe.schema import Recipe
    from cutaway.train.trainer.trainer import Trainer


class CommandClass(TyperCommand):
    """Command whose help ends with the list of the shipped recipes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from cutaway.cli.views.recipe_list import print_recipe_list

        sys.stdout.write(" Recipes\n")
        print_recipe_list()


def train(
    recipe: Annotated[
        str | None,
        argument("Shipped recipe, or a .toml or .json file. Without one, --text chooses a recipe.", metavar="RECIPE"),
    ] = None,
    out: Annotated[Path | None, option("Run directory; default runs/RECIPE, or runs/TEXT.", "--out", "-o")] = None,
    resume: Annotated[Path | None, option("Resume this run from its last checkpoint.", metavar="RUN")] = None,
    status: Annotated[Path | None, option("Print the status of this run.", metavar="RUN")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        option(
            "Report memory and collectives of a simulated step of one rank; for fine-tuning, also data, parameters and"
            " steps. Nothing is trained or written.",
            "--dry-run",
        ),
    ] = False,
    world_size: Annotated[int | None, option("Number of ranks of the dry run; default 1.", metavar="N", min=1)] = None,
    texts: Annotated[
        list[Path] | None,
        option(
            "Train on this file or directory instead of the recipe's data; repeatable.",
            "--text",
            "--data",
            metavar="FILE",
        ),
    ] = None,
    text_column: Annotated[
        str | None, option("Column with the text, in files with several columns.", metavar="NAME")
    ] = None,
    target_column: Annotated[
        str | None, option("Column with the target or the label, in files with several columns.", metavar="NAME")
    ] = None,
    minutes: Annotated[
        float | None, option("Without a recipe: how long the training should take; default 5.", metavar="N")
    ] = None,
    base: Annotated[
        str | None,
        option("Checkpoint to fine-tune: a directory, a run, a .gguf file or a Hub id.", metavar="SOURCE"),
    ] = None,
    show_data: Annotated[
        bool, option("Show statistics and examples of the data, with their targets, and exit.", "--show-data")
    ] = False,
    device: Device = None,
    list_recipes: Annotated[bool, option("List the shipped recipes.", "--list")] = False,
    print_recipe: Annotated[bool, option("Print the recipe as TOML instead of training.", "--print-recipe")] = False,
    as_schema: Annotated[bool, option("Print the JSON schema of recipes.", "--schema")] = False,
    as_json: Annotated[bool, json_flag("Print one JSON object per step and per evaluation.")] = False,
) -> None:
    """Train a model on a text or with a recipe, or resume a run.

    A run that was stopped or killed continues with --resume, with the same result as without the interruption.

    Example: cutaway train --text my.txt

    Example: cutaway train python-stdlib --out runs/first --set training.max_steps=500

    Example: cutaway train sft --base SmolLM2.gguf --data chat.jsonl --show-data

    Example: cutaway train lora --base SmolLM2.gguf --data chat.jsonl --dry-run

    Example: cutaway train big.toml --dry-run --world-size 1024 --set parallel.dp_shard=all --set parallel.tp=8
    """
    from cutaway.train.recipe.inputs import check_recipe_inputs
    from cutaway.train.recipe.schema import recipe_json_schema

    if as_schema:
        print_json(recipe_json_schema())
        return
    if list_recipes:
        from cutaway.cli.views.recipe_list import print_recipe_list

        print_recipe_list(as_json=as_json)
        return
    _check_mode(recipe, resume, status, texts, minutes)
    if status is not None:
        from cutaway.cli.views.run_status import format_run_status, load_run_status

        run_status = load_run_status(status)
        if as_json:
            print_json(run_status, indent=None)
        else:
            sys.stdout.write("\n".join([*format_run_status(run_status), ""]))
        return
    non_parallel_overrides = [override for override in overrides or [] if not override.startswith("parallel.")]
    if resume is not None and (out is not None or non_parallel_overrides or texts or base):
        raise InputError(
            "a resumed run uses its own recipe and directory, and only parallel can be overridden; leave out --out,"
            " --text, --base and other --set"
        )
    if world_size is not None and not dry_run:
        raise InputError(
            "--world-size is the number of ranks of a dry run; add --dry-run, or start a training on several processes"
            " with torchrun"
        )
    if dry_run and (resume is not None or out):
        raise InputError("a dry run needs a recipe and writes nothing; leave out --out and --resume")
    loaded_recipe = None
    if resume is None:
        loaded_recipe = _load_recipe(
            recipe,
            overrides or [],
            texts or [],
            base,
            text_column,
            target_column,
            minutes,
            device,
            quiet=as_json or print_recipe,
        )
        if print_recipe:
            from cutaway.train.recipe.dump import recipe_to_toml

            sys.stdout.write(recipe_to_toml(loaded_recipe))
            return
        check_recipe_inputs(loaded_recipe, recipe or "RECIPE")
    if dry_run and loaded_recipe is not None:
        from cutaway.cli.views.dry_run_report import run_dry_run

        run_dry_run(loaded_recipe, world_size or 1, device, as_json=as_json)
        return
    if show_data:
        if loaded_recipe is None:
            raise InputError("--show-data needs a recipe, for example: cutaway train sft --base SOURCE --data FILE")
        _show_data(loaded_recipe, as_json=as_json)
        return
    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.train.distributed.process_group import init_distributed
    from cutaway.train.trainer.launch import prepare_trainer, resume_trainer

    progress = TrainingProgress(as_json=as_json)
    callback = progress.build_callback()
    with init_distributed(device) as dist:
        if loaded_recipe is None:
            assert resume is not None
            trainer = resume_trainer(
                resume, overrides=overrides or [], device=device, callback=callback, dist_context=dist
            )
            if dist.is_main_process and trainer.is_finished:
                progress.on_message(f"'{resume}' is finished: all {trainer.global_step:,} steps are done")
        else:
            run_directory = out or Path("runs") / Path(recipe or (texts or [])[0]).resolve().stem
            trainer = prepare_trainer(loaded_recipe, run_directory, device=device, callback=callback, dist_context=dist)
        if dist.is_main_process and not as_json:
            sys.stderr.write(f"open the run in a browser: cutaway open {trainer.run_directory.directory}\n")
        with progress.track(trainer) if dist.is_main_process else nullcontext():
            trainer.train()
    _print_outcome(trainer, as_json=as_json, is_main_process=dist.is_main_process)


def _show_data(recipe: "Recipe", *, as_json: bool) -> None:
    """Print statistics and examples of the data of a recipe."""
    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.train.trainer.launch import show_data

    show_data(recipe, TrainingProgress(as_json=as_json, stderr=False).build_callback())


def _check_mode(
    recipe: str | None, resume: Path | None, status: Path | None, texts: list[Path] | None, minutes: float | None
) -> None:
    """Raise InputError unless there is exactly one of: a recipe, a text without a recipe, --resume, --status."""
    options = {f"the recipe '{recipe}'": recipe, "--resume": resume, "--status": status}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} cannot be combined; leave one of them out")
    if not given and not texts:
        from cutaway.train.recipe.catalog import list_recipes

        raise InputError(
            f"pass a text with --text FILE, or a recipe ({', '.join(list_recipes())}, or a file), or a run with"
            " --resume or --status"
        )
    if minutes is not None and given:
        raise InputError("--minutes applies to --text without a recipe; set training.max_steps of the recipe instead")


def _load_recipe(
    recipe: str | None,
    overrides: list[str],
    texts: list[Path],
    base: str | None,
    text_column: str | None,
    target_column: str | None,
    minutes: float | None,
    device: str | None,
    *,
    quiet: bool,
) -> "Recipe":
    """Load a recipe, or choose one for the text and print what was chosen."""
    from cutaway.train.recipe.load import load_recipe

    if recipe is not None:
        return load_recipe(recipe, overrides, texts, base, text_column=text_column, target_column=target_column)
    if target_column is not None:
        raise InputError(
            "--target-column needs a recipe with targets or labels, as in: cutaway train classify --base SOURCE --data"
            f" {texts[0]} --target-column {target_column}"
        )
    if base is not None:
        raise InputError(
            "--base fine-tunes a checkpoint, which needs a recipe; `cutaway train --list` lists the recipes, as in:"
            f" cutaway train RECIPE --base {base} --data {texts[0]}"
        )
    from cutaway.train.recipe.auto import DEFAULT_MINUTES, build_auto_recipe, detect_machine

    chosen = build_auto_recipe(
        texts,
        detect_machine(device),
        minutes=DEFAULT_MINUTES if minutes is None else minutes,
        text_column=text_column,
        overrides=overrides,
    )
    loaded = load_recipe(chosen.table, overrides)
    if not quiet:
        sys.stderr.write(
            f"{chosen.summary}. To change it: --minutes 20, --set model.decoder.layers=6, or edit the output of"
            " --print-recipe\n"
        )
    return loaded


def _print_outcome(trainer: "Trainer", *, as_json: bool, is_main_process: bool) -> None:
    """Print the directory of the trained model. If the run is not finished, print how to continue, and exit with 1."""
    from cutaway.cli.views.run_status import command_for_model
    from cutaway.train.trainer.general_loss import general_loss_change

    step, max_steps, run = trainer.global_step, trainer.recipe.training.max_steps, trainer.run_directory
    exported_step = trainer.eval_tracker.best_step if trainer.recipe.checkpoint.export == "best" else None
    change = general_loss_change(trainer.metrics_log, exported_step) if is_main_process else None
    if is_main_process and as_json:
        outcome: dict[str, object] = {"run": str(run.directory), "step": step, "done": trainer.is_finished}
        outcome |= {} if change is None else {"general_loss": change._asdict() | {"percent": change.percent}}
        print_json(outcome | ({"model": str(run.model_directory)} if trainer.is_finished else {}), indent=None)
    elif is_main_process and trainer.is_finished:
        if change is not None:
            sys.stderr.write(f"{change}\n")
        sys.stderr.write(f"the model is in {run.model_directory}; try: {command_for_model(run)}\n")
    elif is_main_process:
        command = f"cutaway train --resume {run.directory}"
        sys.stderr.write(f"stopped after {step} of {max_steps} steps; continue with: {command}\n")
    if not trainer.is_finished:
        raise typer.Exit(1)
