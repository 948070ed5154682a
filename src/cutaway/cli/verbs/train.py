"""`cutaway train`: from a recipe to a trained model, and on from where a run was left."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.train.trainer.trainer import Trainer


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a .toml or .json file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's directory; runs/RECIPE, unless given.")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")] = None,
    status: Annotated[Path | None, typer.Option("--status", metavar="RUN", help="Say how far this run came.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=x", help="Change one of the recipe's values; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what one of --world-size ranks would hold and send; train nothing.")
    ] = False,
    world_size: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks of the dry run.")] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Read this instead of the recipe's text; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    as_schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of a recipe, for editors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each step and each look.")] = False,
) -> None:
    """Train a model by a recipe. A run that was stopped, or killed, goes on with --resume as if it had not been.

    Example: cutaway train python-stdlib --out runs/first --set training.max_steps=500

    Example: cutaway train gpt2-124m --text books/ --text more.jsonl

    Example: cutaway train big.toml --dry-run --world-size 1024 --set parallel.dp_shard=all --set parallel.tp=8
    """
    from cutaway.train.recipe.load import list_recipes, load_recipe
    from cutaway.train.recipe.schema import recipe_json_schema

    if as_schema:
        sys.stdout.write(json.dumps(recipe_json_schema(), indent=2) + "\n")
        return
    if sum(given is not None for given in (recipe, resume, status)) != 1:
        raise InputError(f"give a recipe ({', '.join(list_recipes())}, or a file), or a run with --resume or --status")
    if status is not None:
        from cutaway.cli.views.training_progress import format_run_status, load_run_status

        found = load_run_status(status)
        sys.stdout.write((json.dumps(found) if as_json else "\n".join(format_run_status(found))) + "\n")
        return
    others = [each for each in overrides or [] if not each.startswith("parallel.")]
    if resume is not None and (out is not None or others or texts):
        raise InputError(
            "a resumed run has its own recipe and directory, and only parallel can change; leave --out, --set and"
            " --text out"
        )
    if dry_run or world_size is not None:
        if world_size is None or not dry_run or recipe is None or out is not None:
            raise InputError(
                "a dry run takes a recipe, --dry-run and --world-size N, and writes nothing; leave --out out"
            )
        from cutaway.cli.views.dry_run_report import run_dry_run

        run_dry_run(load_recipe(recipe, overrides or [], texts or []), world_size, as_json=as_json)
        return
    from cutaway.cli.views.training_progress import TrainingProgress
    from cutaway.train.distributed.process_group import init_distributed
    from cutaway.train.trainer.launch import prepare_trainer, resume_trainer

    bar = TrainingProgress(as_json=as_json)
    watcher = bar.build_callback()
    with init_distributed(device) as ranks:
        if resume is not None:
            loop = resume_trainer(
                resume, overrides=overrides or [], device=device, callback=watcher, dist_context=ranks
            )
            if ranks.is_main_process and loop.global_step == loop.recipe.training.max_steps:
                bar.on_message(f"'{resume}' is finished: all {loop.global_step:,} steps have been taken")
        else:
            chosen = load_recipe(str(recipe), overrides or [], texts or [])
            where = out or Path("runs") / Path(str(recipe)).stem
            loop = prepare_trainer(chosen, where, device=device, callback=watcher, dist_context=ranks)
        with bar.track(loop) if ranks.is_main_process else nullcontext():
            loop.train()
    _print_outcome(loop, as_json=as_json, is_main_process=ranks.is_main_process)


def _print_outcome(trainer: "Trainer", *, as_json: bool, is_main_process: bool) -> None:
    """What was made, and how to go on."""
    done, steps, where = trainer.global_step, trainer.recipe.training.max_steps, trainer.run_directory.directory
    if not is_main_process:
        pass
    elif as_json:
        told = {"run": str(where), "step": done, "done": done == steps}
        sys.stdout.write(
            json.dumps(told | ({"model": str(trainer.run_directory.model_directory)} if done == steps else {})) + "\n"
        )
    elif done == steps:
        mask = trainer.run_directory.tokenizer.special_tokens_map.get("mask_token")
        text = f"'a text with a {mask}'" if trainer.model.config.form == "encoder" else "TEXT"
        sys.stderr.write(
            f"the model is in {trainer.run_directory.model_directory}; try: cutaway generate {where} {text}\n"
        )
    else:
        sys.stderr.write(f"stopped after {done} of {steps} steps; go on with: cutaway train --resume {where}\n")
    if done < steps:
        raise typer.Exit(1)
