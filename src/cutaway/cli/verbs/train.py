"""`cutaway train`: train a model with a recipe, resume a run, print its status, or simulate a step (dry run)."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import Device, Overrides, argument, json_flag, option
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.train.trainer.trainer import Trainer


def train(
    recipe: Annotated[str | None, argument("Shipped recipe, or a .toml or .json file.", metavar="RECIPE")] = None,
    out: Annotated[Path | None, option("Run directory; default runs/RECIPE.", "--out", "-o")] = None,
    resume: Annotated[Path | None, option("Resume this run from its last checkpoint.", metavar="RUN")] = None,
    status: Annotated[Path | None, option("Print the status of this run.", metavar="RUN")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        option("Simulate one step of one rank and report memory and collectives; requires --world-size.", "--dry-run"),
    ] = False,
    world_size: Annotated[int | None, option("Number of ranks of the dry run.", metavar="N", min=1)] = None,
    texts: Annotated[
        list[Path] | None,
        option(
            "Train on this file or directory instead of the recipe's data; repeatable.",
            "--text",
            "--data",
            metavar="FILE",
        ),
    ] = None,
    base: Annotated[
        str | None,
        option("Checkpoint to fine-tune: a directory, a run, a .gguf file or a Hub id.", metavar="SOURCE"),
    ] = None,
    show_data: Annotated[
        bool, option("Show statistics and examples of the data, with their targets, and exit.", "--show-data")
    ] = False,
    device: Device = None,
    as_schema: Annotated[bool, option("Print the JSON schema of recipes.", "--schema")] = False,
    as_json: Annotated[bool, json_flag("Print one JSON object per step and per evaluation.")] = False,
) -> None:
    """Train a model with a recipe, or resume a run.

    A run that was stopped or killed continues with --resume, with the same result as without the interruption.

    Example: cutaway train python-stdlib --out runs/first --set training.max_steps=500

    Example: cutaway train gpt2-124m --text books/ --text more.jsonl

    Example: cutaway train sft --base SmolLM2.gguf --data chat.jsonl --show-data

    Example: cutaway train big.toml --dry-run --world-size 1024 --set parallel.dp_shard=all --set parallel.tp=8
    """
    from cutaway.train.recipe.load import list_recipes, load_recipe
    from cutaway.train.recipe.schema import recipe_json_schema

    if as_schema:
        print_json(recipe_json_schema())
        return
    if sum(argument is not None for argument in (recipe, resume, status)) != 1:
        raise InputError(f"pass a recipe ({', '.join(list_recipes())}, or a file), or a run with --resume or --status")
    if status is not None:
        from cutaway.cli.views.training_progress import format_run_status, load_run_status

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
    if dry_run or world_size is not None:
        if world_size is None or not dry_run or recipe is None or out is not None:
            raise InputError("a dry run needs a recipe, --dry-run and --world-size N, but no --out")
        from cutaway.cli.views.dry_run_report import run_dry_run

        run_dry_run(load_recipe(recipe, overrides or [], texts or [], base), world_size, as_json=as_json)
        return
    if show_data:
        _show_data(recipe, overrides or [], texts or [], base, as_json=as_json)
        return
    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.train.distributed.process_group import init_distributed
    from cutaway.train.trainer.launch import prepare_trainer, resume_trainer

    progress = TrainingProgress(as_json=as_json)
    callback = progress.build_callback()
    with init_distributed(device) as dist:
        if resume is not None:
            trainer = resume_trainer(
                resume, overrides=overrides or [], device=device, callback=callback, dist_context=dist
            )
            if dist.is_main_process and trainer.global_step == trainer.recipe.training.max_steps:
                progress.on_message(f"'{resume}' is finished: all {trainer.global_step:,} steps are done")
        else:
            loaded_recipe = load_recipe(str(recipe), overrides or [], texts or [], base)
            run_directory = out or Path("runs") / Path(str(recipe)).stem
            trainer = prepare_trainer(loaded_recipe, run_directory, device=device, callback=callback, dist_context=dist)
        if dist.is_main_process and not as_json:
            sys.stderr.write(f"open the run in a browser: cutaway open {trainer.run_directory.directory}\n")
        with progress.track(trainer) if dist.is_main_process else nullcontext():
            trainer.train()
    _print_outcome(trainer, as_json=as_json, is_main_process=dist.is_main_process)


def _show_data(recipe: str | None, overrides: list[str], texts: list[Path], base: str | None, *, as_json: bool) -> None:
    """Print statistics and examples of the data of a recipe."""
    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.train.recipe.load import load_recipe
    from cutaway.train.trainer.launch import show_data

    if recipe is None:
        raise InputError("--show-data needs a recipe, for example: cutaway train sft --base SOURCE --data FILE")
    progress = TrainingProgress(as_json=as_json, stderr=False)
    show_data(load_recipe(recipe, overrides, texts, base), progress.build_callback())


def _print_outcome(trainer: "Trainer", *, as_json: bool, is_main_process: bool) -> None:
    """Print the directory of the trained model. If the run is not finished, print how to continue, and exit with 1."""
    step, max_steps, run = trainer.global_step, trainer.recipe.training.max_steps, trainer.run_directory
    if is_main_process and as_json:
        outcome = {"run": str(run.directory), "step": step, "done": step == max_steps}
        print_json(outcome | ({"model": str(run.model_directory)} if step == max_steps else {}), indent=None)
    elif is_main_process and step == max_steps:
        mask = run.tokenizer.special_tokens_map.get("mask_token")
        text = f"'a text with a {mask}'" if trainer.model.config.form == "encoder" else "TEXT"
        flag = "--message " if trainer.recipe.objective.kind == "sft" and run.tokenizer.chat_template else ""
        sys.stderr.write(f"the model is in {run.model_directory}; try: cutaway generate {run.directory} {flag}{text}\n")
    elif is_main_process:
        command = f"cutaway train --resume {run.directory}"
        sys.stderr.write(f"stopped after {step} of {max_steps} steps; continue with: {command}\n")
    if step < max_steps:
        raise typer.Exit(1)
