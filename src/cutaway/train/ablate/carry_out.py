"""All runs of a plan, several at a time, each in a process of its own; what was done before is not done again."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from cutaway.errors import InputError
from cutaway.generate.plan import free_memory
from cutaway.train.ablate.one_run import OUTCOME, Job, work
from cutaway.train.ablate.plan import Plan, Variant
from cutaway.train.room import expected
from cutaway.train.run import ABOUT, Run

PROCESS = 400 << 20
"""Bytes of a process that has done nothing yet."""
Outcomes = dict[tuple[str, int], dict[str, Any]]
"""What came of each (variant, seed)."""
Told = Callable[[str, int], None]
"""Is told a run's name and the steps it has done."""


@dataclass
class Running:
    """A run in its process."""

    name: str
    process: Any
    pipe: "connection.Connection"
    finished: bool | None = None


class StoppedError(Exception):
    """Somebody asked to stop; what was learned is kept."""


def carry_out(
    plan: Plan, out: Path, *, jobs: int | None = None, device: str | None = None, told: Told = lambda *_: None
) -> Outcomes:
    """Train and measure what is not done yet, and return what came of everything."""
    where = {(v.name, seed): plan.directory(out, v, seed) for v in plan.variants for seed in plan.seeds}
    for variant in plan.variants:
        for seed in plan.seeds:
            check_same(where[variant.name, seed], plan, variant, seed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = [(v, seed) for seed in plan.seeds for v in plan.variants if not is_done(where[v.name, seed])]
    for v in plan.variants:
        for seed in plan.seeds:
            if (v, seed) not in waiting:
                told(f"{v.name}, seed {seed}", v.cost.steps)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = min(jobs or (cores if device == "cpu" else 1), len(where))
    # Not by how many are left, or find room: with other threads a run that goes on would come to other bits.
    threads = max(1, cores // wanted)
    at_once = wanted if jobs else min(wanted, room(plan, torch.device(device)))
    running: list[Running] = []
    # Forks of a process that has imported torch and done nothing else begin at once; where there are none, a new one.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["cutaway.train.ablate.one_run", "cutaway.train.ablate.measures"])
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                variant, seed = waiting.pop(0)
                weigh = seed == plan.seeds[0]
                recipe = plan.recipe(variant, seed).model_dump(mode="json", exclude_none=True)
                directory = str(where[variant.name, seed])
                job = Job(directory, recipe, variant.surgery, plan.measure, weigh, device, threads)
                running.append(start(context, job, f"{variant.name}, seed {seed}"))
            listen(running, told)
            for run in [run for run in running if not run.process.is_alive()]:
                running.remove(run)
                listen([run], told)
                check_end(run)
    except BaseException:
        end_all(running)
        raise
    return {key: json.loads((directory / OUTCOME).read_text("utf-8")) for key, directory in where.items()}


def room(plan: Plan, device: torch.device) -> int:
    """How many of the largest runs there is memory for; one is always tried."""
    free = free_memory(device)
    if free is None:
        return len(plan.variants) * len(plan.seeds)
    largest = max(expected(each.recipe, each.recipe.shape, device)[0] for each in plan.variants)
    return max(1, int(free // (largest + PROCESS)))


def start(context: Any, job: Job, name: str) -> Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, dict(os.environ), theirs))
    process.start()
    theirs.close()
    return Running(name, process, ours)


def listen(running: list[Running], told: Told) -> None:
    """Pass on what the runs say, until none says anything for a moment or one ends."""
    ready = connection.wait([*(run.pipe for run in running), *(run.process.sentinel for run in running)], timeout=0.5)
    for run in running:
        while run.pipe in ready and run.pipe.poll():
            try:
                kind, what = run.pipe.recv()
            except EOFError:  # it has ended
                break
            if kind == "step":
                told(run.name, what)
            elif kind == "error":
                raise InputError(f"{run.name}: {what}")
            else:
                run.finished = what


def check_end(run: Running) -> None:
    run.process.join()
    if run.finished:
        return
    if run.finished is False:
        raise StoppedError
    raise InputError(
        f"{run.name} ended by itself (exit code {run.process.exitcode}), as for want of memory; run fewer at once with"
        " --jobs, and go on with the same command"
    )


def end_all(running: list[Running]) -> None:
    """Ask each to save and end; it finishes the step at hand."""
    for run in running:
        run.process.terminate()
    for run in running:
        run.process.join()


def is_done(directory: Path) -> bool:
    return (directory / OUTCOME).exists()


def check_same(directory: Path, plan: Plan, variant: Variant, seed: int) -> None:
    """What is there must be this run, or it would be taken for another."""
    if (directory / ABOUT).exists() and Run.open(directory).recipe != plan.recipe(variant, seed):
        raise InputError(f"'{directory}' holds a run of another recipe; name another directory with --out")
