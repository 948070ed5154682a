"""`cutaway train`: from a recipe to a trained model, and on from where a run was left."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.train.loop import Loop


def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a .toml or .json file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's directory; runs/RECIPE, unless given.")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")] = None,
    show: Annotated[Path | None, typer.Option("--show", metavar="RUN", help="Say how far this run came.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=x", help="Change one of the recipe's values; repeatable.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Say what one of --world ranks would hold and send; train nothing.")
    ] = False,
    world: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ranks to rehearse with.")] = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Read this instead of the recipe's text; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    as_schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of a recipe, for editors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object for each step and each look.")] = False,
) -> None:
    """Train a model by a recipe. A run that was stopped, or killed, goes on with --resume as if it had not been.

    Example: cutaway train python-stdlib --out runs/first --set training.steps=500

    Example: cutaway train gpt2-124m --text books/ --text more.jsonl

    Example: cutaway train big.toml --rehearse --world 1024 --set parallel.shards=all --set parallel.tensor=8
    """
    from cutaway.train.recipe import recipe as read_recipe
    from cutaway.train.recipe import recipes, schema

    if as_schema:
        sys.stdout.write(json.dumps(schema(), indent=2) + "\n")
        return
    if sum(given is not None for given in (recipe, resume, show)) != 1:
        raise InputError(f"give a recipe ({', '.join(recipes())}, or a file), or a run with --resume or --show")
    if show is not None:
        from cutaway.cli.run_view import lines, told

        found = told(show)
        sys.stdout.write((json.dumps(found) if as_json else "\n".join(lines(found))) + "\n")
        return
    others = [each for each in changes or [] if not each.startswith("parallel.")]
    if resume is not None and (out is not None or others or texts):
        raise InputError(
            "a resumed run has its own recipe and directory, and only parallel can change; leave --out, --set and"
            " --text out"
        )
    if rehearse or world is not None:
        if world is None or not rehearse or recipe is None or out is not None:
            raise InputError(
                "a rehearsal takes a recipe, --rehearse and --world N, and writes nothing; leave --out out"
            )
        from cutaway.cli.rehearsal import show as show_rehearsal

        show_rehearsal(read_recipe(recipe, changes or [], texts or []), world, as_json=as_json)
        return
    from cutaway.cli.progress import Bar
    from cutaway.train.ranks import together
    from cutaway.train.start import begin, go_on

    bar = Bar(as_json=as_json)
    watcher = bar.watcher()
    with together(device) as ranks:
        if resume is not None:
            loop = go_on(resume, changes=changes or [], device=device, watcher=watcher, ranks=ranks)
            if ranks.leader and loop.done == loop.recipe.training.steps:
                bar.say(f"'{resume}' is finished: all {loop.done:,} steps have been taken")
        else:
            chosen = read_recipe(str(recipe), changes or [], texts or [])
            where = out or Path("runs") / Path(str(recipe)).stem
            loop = begin(chosen, where, device=device, watcher=watcher, ranks=ranks)
        with bar.over(loop) if ranks.leader else nullcontext():
            loop.go()
    finished(loop, as_json=as_json, speaks=ranks.leader)


def finished(loop: "Loop", *, as_json: bool, speaks: bool) -> None:
    """What was made, and how to go on."""
    done, steps, where = loop.done, loop.recipe.training.steps, loop.run.directory
    if not speaks:
        pass
    elif as_json:
        told = {"run": str(where), "step": done, "done": done == steps}
        sys.stdout.write(json.dumps(told | ({"model": str(loop.run.model)} if done == steps else {})) + "\n")
    elif done == steps:
        mask = loop.run.tokenizer.named.get("mask_token")
        text = f"'a text with a {mask}'" if loop.model.config.form == "encoder" else "TEXT"
        sys.stderr.write(f"the model is in {loop.run.model}; try: cutaway generate {where} {text}\n")
    else:
        sys.stderr.write(f"stopped after {done} of {steps} steps; go on with: cutaway train --resume {where}\n")
    if done < steps:
        raise typer.Exit(1)
