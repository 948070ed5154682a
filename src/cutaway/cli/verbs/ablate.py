"""`cutaway ablate`: ablation studies, which train variants of a recipe at equal budget and compare them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import Device, argument, json_flag, option
from cutaway.errors import InputError

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.train.ablate.ablation import Ablation
    from cutaway.train.ablate.launcher import ProgressFn

MATCHED_BUDGETS = ("tokens", "parameters", "flops")


def ablate(
    recipe: Annotated[
        str,
        argument(
            "Name of a shipped recipe, a .toml or .json file, or a study: depth-and-norm, components, positions or"
            " component-removal.",
            metavar="RECIPE|STUDY",
        ),
    ],
    vary: Annotated[
        list[str] | None,
        option(
            "Values to compare for a recipe key, or for activation, depth, ffn, heads, kv-heads, norm, placement,"
            " position. If repeated, all combinations are trained; the first variant is the baseline.",
            metavar="KEY=a,b",
        ),
    ] = None,
    match: Annotated[
        str | None,
        option(
            "Budget that is equal for all variants: tokens (default), parameters (adapts the FFN hidden size)"
            " or flops (adapts the number of steps)."
        ),
    ] = None,
    num_seeds: Annotated[
        int, option("Number of seeds per variant; more seeds give narrower confidence intervals.")
    ] = 3,
    out: Annotated[
        Path | None, option("Directory of runs and results; default runs/ablate-NAME.", "--out", "-o")
    ] = None,
    overrides: Annotated[
        list[str] | None, option("Override a recipe value in all variants; repeatable.", "--set", metavar="a.b=x")
    ] = None,
    jobs: Annotated[int | None, option("Number of concurrent runs; default one per core, or one on a GPU.")] = None,
    device: Device = None,
    as_json: Annotated[bool, json_flag("Print one JSON object per variant, measurement and finding.")] = False,
) -> None:
    """Train variants of a recipe at equal budget with several seeds and compare them.

    After an interruption, the same command continues where it stopped.

    Example: cutaway ablate python-stdlib --vary norm=rmsnorm,layernorm --set training.max_steps=100
    """
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs is {jobs}; use at least 1")
    if match not in (None, *MATCHED_BUDGETS):
        raise InputError(f"--match {match} is unknown; use one of {', '.join(MATCHED_BUDGETS)}")
    from cutaway.train.ablate.ablation import build_ablation
    from cutaway.train.ablate.launcher import AblationStoppedError

    ablation = build_ablation(
        recipe,
        vary or [],
        output_dir=out,
        match=match,  # type: ignore[arg-type]
        num_seeds=num_seeds,
        overrides=overrides or [],
    )
    if not as_json:
        description = f": {ablation.study.description}" if ablation.study else ""
        num_runs = len(ablation.plan.variants) * len(ablation.plan.seeds)
        sys.stderr.write(f"{ablation.plan.name}{description}\n{num_runs} runs in {ablation.output_dir}\n")
    try:
        with _progress_bar(ablation, quiet=as_json) as on_progress:
            results = ablation.run(num_workers=jobs, device=device, on_progress=on_progress)
    except (AblationStoppedError, KeyboardInterrupt):
        sys.stderr.write("stopped; finished runs are kept: continue with the same command\n")
        raise typer.Exit(1) from None
    if as_json:
        findings = [{"finding": finding} for finding in results["findings"]]
        for row in (*results["variants"], *results["measurements"], *findings):
            print_json(row, indent=None)
        return
    from cutaway.cli.views.ablation_report import render_ablation

    render_ablation(results, ablation)


@contextmanager
def _progress_bar(ablation: "Ablation", *, quiet: bool) -> Iterator["ProgressFn"]:
    """Context manager: show a progress bar over the steps of all runs, with the name of the current run."""
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
    steps_by_run: dict[str, int] = {}
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def on_progress(name: str, steps: int) -> None:
            steps_by_run[name] = steps
            bar.update(task, completed=sum(steps_by_run.values()), description=name)

        yield on_progress
