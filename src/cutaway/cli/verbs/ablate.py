"""`cutaway ablate`: ablation studies, which train variants of a recipe at equal budget and compare them."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from cutaway.cli.json_output import print_json
from cutaway.cli.options import Device, Overrides, argument, json_flag, option

MatchedBudget = Literal["tokens", "parameters", "flops"]


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
            "Values to compare. KEY is a recipe key or one of activation, depth, ffn, heads, kv-heads, norm, placement,"
            " position. If repeated, all combinations are trained; the first one is the baseline.",
            metavar="KEY=a,b",
        ),
    ] = None,
    match: Annotated[
        MatchedBudget | None,
        option(
            "Budget that is equal for all variants: tokens (default), parameters (adapts the FFN hidden size)"
            " or flops (adapts the number of steps)."
        ),
    ] = None,
    num_seeds: Annotated[int, option("Number of seeds per variant; more give narrower confidence intervals.")] = 3,
    out: Annotated[Path | None, option("Output directory; default runs/ablate-NAME.", "--out", "-o")] = None,
    overrides: Overrides = None,
    jobs: Annotated[int | None, option("Number of concurrent runs; default one per core, one on a GPU.", min=1)] = None,
    device: Device = None,
    as_json: Annotated[bool, json_flag("Print one JSON object per variant, measurement and finding.")] = False,
) -> None:
    """Train variants of a recipe at equal budget with several seeds and compare them.

    After an interruption, the same command continues where it stopped.

    Example: cutaway ablate python-stdlib --vary norm=rmsnorm,layernorm --set training.max_steps=100
    """
    from cutaway.cli.views.terminal import progress_bar
    from cutaway.train.ablate.ablation import build_ablation
    from cutaway.train.ablate.launcher import AblationStoppedError

    ablation = build_ablation(
        recipe, vary or [], output_dir=out, match=match, num_seeds=num_seeds, overrides=overrides or []
    )
    plan, steps_by_run = ablation.plan, dict[str, int]()
    total_steps = sum(variant.cost.steps for variant in plan.variants) * len(plan.seeds)
    if not as_json:
        description = f": {ablation.study.description}" if ablation.study else ""
        num_runs = len(plan.variants) * len(plan.seeds)
        sys.stderr.write(f"{plan.name}{description}\n{num_runs} runs in {ablation.output_dir}\n")
    try:
        with _interrupt_on_signals(), progress_bar("steps", quiet=as_json) as progress:

            def on_progress(run_name: str, steps: int) -> None:
                steps_by_run[run_name] = steps
                progress(sum(steps_by_run.values()), total_steps, f"steps, {run_name}")

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
def _interrupt_on_signals() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP stop the ablation like Ctrl-C: the running workers save checkpoints."""

    def interrupt(number: int, frame: object) -> None:
        for each in numbers:  # a closed terminal may cause several signals
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) != signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
