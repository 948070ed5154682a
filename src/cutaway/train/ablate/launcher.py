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
from cutaway.model.device import free_memory
from cutaway.train.ablate.plan import AblationPlan, Variant
from cutaway.train.ablate.worker import OUTCOME_FILE, Job, run_worker
from cutaway.train.checkpoint.run_directory import RUN_FILE, RunDirectory
from cutaway.train.trainer.memory_check import expected_memory

PROCESS_OVERHEAD_BYTES = 400 << 20
"""Bytes of a process that has done nothing yet."""
RunOutcomes = dict[tuple[str, int], dict[str, Any]]
"""What came of each (variant, seed)."""
ProgressFn = Callable[[str, int], None]
"""Is told a run's name and the steps it has done."""


@dataclass
class RunningJob:
    """A run in its process."""

    name: str
    process: Any
    pipe: "connection.Connection"
    finished: bool | None = None


class AblationStoppedError(Exception):
    """Somebody asked to stop; what was learned is kept."""


def run_jobs(
    plan: AblationPlan,
    output_dir: Path,
    *,
    num_workers: int | None = None,
    device: str | None = None,
    on_progress: ProgressFn = lambda *_: None,
) -> RunOutcomes:
    """Train and measure what is not done yet, and return what came of everything."""
    where = {(v.name, seed): plan.run_directory(output_dir, v, seed) for v in plan.variants for seed in plan.seeds}
    for variant in plan.variants:
        for seed in plan.seeds:
            _check_same_recipe(where[variant.name, seed], plan, variant, seed)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting = [(v, seed) for seed in plan.seeds for v in plan.variants if not _is_finished(where[v.name, seed])]
    for v in plan.variants:
        for seed in plan.seeds:
            if (v, seed) not in waiting:
                on_progress(f"{v.name}, seed {seed}", v.cost.steps)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = min(num_workers or (cores if device == "cpu" else 1), len(where))
    # Not by how many are left, or find room: with other threads a run that goes on would come to other bits.
    threads = max(1, cores // wanted)
    at_once = wanted if num_workers else min(wanted, _max_parallel_runs(plan, torch.device(device)))
    running: list[RunningJob] = []
    # Forks of a process that has imported torch and done nothing else begin at once; where there are none, a new one.
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    context.set_forkserver_preload(["cutaway.train.ablate.worker", "cutaway.train.ablate.measurements"])
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                variant, seed = waiting.pop(0)
                weigh = seed == plan.seeds[0]
                recipe = plan.run_recipe(variant, seed).model_dump(mode="json", exclude_none=True)
                directory = str(where[variant.name, seed])
                job = Job(directory, recipe, variant.surgery, plan.measurement, weigh, device, threads)
                running.append(_start_job(context, job, f"{variant.name}, seed {seed}"))
            _poll_jobs(running, on_progress)
            for run in [run for run in running if not run.process.is_alive()]:
                running.remove(run)
                _poll_jobs([run], on_progress)
                _check_finished(run)
    except BaseException:
        _terminate_jobs(running)
        raise
    return {key: json.loads((directory / OUTCOME_FILE).read_text("utf-8")) for key, directory in where.items()}


def _max_parallel_runs(plan: AblationPlan, device: torch.device) -> int:
    """How many of the largest runs there is memory for; one is always tried."""
    free = free_memory(device)
    if free is None:
        return len(plan.variants) * len(plan.seeds)
    largest = max(expected_memory(each.recipe, each.recipe.transformer_config, device)[0] for each in plan.variants)
    return max(1, int(free // (largest + PROCESS_OVERHEAD_BYTES)))


def _start_job(context: Any, job: Job, name: str) -> RunningJob:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_worker, args=(job, dict(os.environ), theirs))
    process.start()
    theirs.close()
    return RunningJob(name, process, ours)


def _poll_jobs(jobs: list[RunningJob], on_progress: ProgressFn) -> None:
    """Pass on what the runs say, until none says anything for a moment or one ends."""
    ready = connection.wait([*(run.pipe for run in jobs), *(run.process.sentinel for run in jobs)], timeout=0.5)
    for run in jobs:
        while run.pipe in ready and run.pipe.poll():
            try:
                kind, what = run.pipe.recv()
            except EOFError:  # it has ended
                break
            if kind == "step":
                on_progress(run.name, what)
            elif kind == "error":
                raise InputError(f"{run.name}: {what}")
            else:
                run.finished = what


def _check_finished(job: RunningJob) -> None:
    job.process.join()
    if job.finished:
        return
    if job.finished is False:
        raise AblationStoppedError
    raise InputError(
        f"{job.name} ended by itself (exit code {job.process.exitcode}), as for want of memory; run fewer at once with"
        " --jobs, and go on with the same command"
    )


def _terminate_jobs(jobs: list[RunningJob]) -> None:
    """Ask each to save and end; it finishes the step at hand."""
    for run in jobs:
        run.process.terminate()
    for run in jobs:
        run.process.join()


def _is_finished(directory: Path) -> bool:
    return (directory / OUTCOME_FILE).exists()


def _check_same_recipe(directory: Path, plan: AblationPlan, variant: Variant, seed: int) -> None:
    """What is there must be this run, or it would be taken for another."""
    if (directory / RUN_FILE).exists() and RunDirectory.open(directory).recipe != plan.run_recipe(variant, seed):
        raise InputError(f"'{directory}' holds a run of another recipe; name another directory with --out")
