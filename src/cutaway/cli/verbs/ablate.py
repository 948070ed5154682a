"""`cutaway ablate`: what does a part do? Variants trained alike, and compared."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when the work begins
    from cutaway.train.ablate.ablation import Ablation
    from cutaway.train.ablate.launcher import ProgressFn

MATCHED_BUDGETS = ("tokens", "parameters", "flops")


def ablate(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|STUDY",
            help="A shipped recipe's name, a .toml or .json file, or a study: depth-and-norm, components,"
            " positions or component-removal.",
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="KEY=a,b",
            help="What is varied: any key of the recipe, or activation, depth, ffn, heads, kv-heads, norm, placement,"
            " position. Several give every combination; the first is what the others are measured against.",
        ),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="What every variant gets the same of: tokens (the default), parameters (by the FFN's width) or flops"
            " (by the number of steps)."
        ),
    ] = None,
    num_seeds: Annotated[int, typer.Option(help="Runs of each variant; more make intervals narrower.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where runs and results go; runs/ablate-NAME, unless given.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=x", help="Change one of the recipe's values for all.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; one a core, or one on a GPU, unless given.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each variant, reading and finding.")
    ] = False,
) -> None:
    """Train variants of a recipe at equal budget from several seeds, and say what differs by how much.

    Stopped or killed, it goes on where it was with the same command.

    Example: cutaway ablate python-stdlib --vary norm=rmsnorm,layernorm --set training.max_steps=100
    """
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs} runs nothing; give 1 or more")
    if match not in (None, *MATCHED_BUDGETS):
        raise InputError(f"--match {match} is unknown; use one of {', '.join(MATCHED_BUDGETS)}")
    from cutaway.train.ablate.ablation import build_ablation
    from cutaway.train.ablate.launcher import AblationStoppedError

    asked = build_ablation(
        recipe,
        vary or [],
        output_dir=out,
        match=match,  # type: ignore[arg-type]
        num_seeds=num_seeds,
        overrides=overrides or [],
    )
    if not as_json:
        said = f": {asked.study.description}" if asked.study else ""
        runs = len(asked.plan.variants) * len(asked.plan.seeds)
        sys.stderr.write(f"{asked.plan.name}{said}\n{runs} runs go to {asked.output_dir}\n")
    try:
        with _progress_bar(asked, quiet=as_json) as told:
            data = asked.run(num_workers=jobs, device=device, on_progress=told)
    except (AblationStoppedError, KeyboardInterrupt):
        sys.stderr.write("stopped; what is trained is kept: go on with the same command\n")
        raise typer.Exit(1) from None
    if as_json:
        for row in _to_json_rows(data):
            sys.stdout.write(json.dumps(row) + "\n")
        return
    from cutaway.cli.views.ablation_report import render_ablation

    render_ablation(data, asked)


def _to_json_rows(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from results["variants"]
    yield from results["measurements"]
    yield from ({"finding": each} for each in results["findings"])


@contextmanager
def _progress_bar(ablation: "Ablation", *, quiet: bool) -> Iterator["ProgressFn"]:
    """A line that moves: steps of all runs together, and what is being trained."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.completed:>6.0f}/{task.total:.0f} steps"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    plan = ablation.plan
    total = sum(variant.cost.steps for variant in plan.variants) * len(plan.seeds)
    done: dict[str, int] = {}
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def told(name: str, steps: int) -> None:
            done[name] = steps
            bar.update(task, completed=sum(done.values()), description=name)

        yield told
