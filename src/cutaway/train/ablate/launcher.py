"""Run the training runs of a plan in worker processes, several at a time. Finished runs are not repeated."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from cutaway.device import free_memory
from cutaway.errors import InputError
from cutaway.train.ablate.plan import AblationPlan, Variant
from cutaway.train.ablate.worker import OUTCOME_FILE, Job, Outcome, run_worker
from cutaway.train.checkpoint.run_directory import RUN_FILE, RunDirectory
from cutaway.train.data.tokenize import num_cores
from cutaway.train.trainer.memory_check import expected_memory

PROCESS_OVERHEAD_BYTES = 400 << 20
"""Memory of a worker process before training starts, in bytes."""
RunOutcomes = dict[tuple[str, int], Outcome]
"""Outcome of each run, by variant name and seed."""
ProgressFn = Callable[[str, int], None]
"""Function that is called with the name of a run and the number of its finished steps."""


@dataclass
class _RunningJob:
    """A training run, its worker process, and the pipe from which the worker's messages are read.

    `finished` is None until the process reports whether training is completed.
    """

    name: str
    process: BaseProcess
    pipe: "connection.Connection"
    finished: bool | None = None


class AblationStoppedError(Exception):
    """The ablation was interrupted. Its runs have saved checkpoints, from which they can resume."""


def run_jobs(
    plan: AblationPlan,
    output_dir: Path,
    *,
    num_workers: int | None = None,
    device: str | None = None,
    on_progress: ProgressFn = lambda *_: None,
) -> RunOutcomes:
    """Train and measure the runs that are not finished, and return the outcomes of all runs."""
    directories: dict[tuple[str, int], Path] = {}
    pending: list[tuple[Variant, int]] = []
    for variant, seed in product(plan.variants, plan.seeds):
        directory = directories[variant.name, seed] = plan.run_directory(output_dir, variant, seed)
        if (directory / RUN_FILE).exists() and RunDirectory.open(directory).recipe != plan.run_recipe(variant, seed):
            raise InputError(f"'{directory}' has a run of another recipe; pass another directory with --out")
        if (directory / OUTCOME_FILE).exists():
            on_progress(f"{variant.name}, seed {seed}", variant.cost.steps)
        else:
            pending.append((variant, seed))
    pending.sort(key=lambda run: run[1])  # all variants of the first seed, then all of the next seed
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    max_workers = min(num_workers or (num_cores() if device == "cpu" else 1), len(directories))
    # The number of threads must not depend on pending runs or free memory: with another number of threads, the results
    # of a resumed run would not be bit-identical.
    num_threads = max(1, num_cores() // max_workers)
    num_parallel = max_workers if num_workers else min(max_workers, _max_parallel_runs(plan, torch.device(device)))
    running: list[_RunningJob] = []
    # On Linux, processes are forked from a server that has imported torch already, so that they start quickly. On other
    # platforms they are spawned.
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutaway.train.ablate.worker", "cutaway.train.ablate.measurements"])
    if sys.platform == "linux":
        _start_fork_server()
    try:
        while pending or running:
            while pending and len(running) < num_parallel:
                variant, seed = pending.pop(0)
                job = Job(
                    directory=str(directories[variant.name, seed]),
                    recipe=plan.run_recipe(variant, seed),
                    edits=variant.edits,
                    measurement=plan.measurement,
                    measure_memory=seed == plan.seeds[0],
                    device=device,
                    num_threads=num_threads,
                )
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=run_worker, args=(job, dict(os.environ), sender))
                process.start()
                sender.close()
                running.append(_RunningJob(f"{variant.name}, seed {seed}", process, receiver))
            _poll_jobs(running, on_progress)
            for finished_job in [job for job in running if not job.process.is_alive()]:
                running.remove(finished_job)
                _poll_jobs([finished_job], on_progress)
                _check_finished(finished_job)
    except BaseException:
        _terminate_jobs(running)
        raise
    return {key: json.loads((directory / OUTCOME_FILE).read_text("utf-8")) for key, directory in directories.items()}


def _start_fork_server() -> None:
    """Start the fork server without SIGHUP: if a terminal is closed, the server must outlive the workers' last save."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def _max_parallel_runs(plan: AblationPlan, device: torch.device) -> int:
    """Number of runs that fit in memory at the same time, if all are as large as the largest. At least 1."""
    free = free_memory(device)
    if free is None:
        return len(plan.variants) * len(plan.seeds)
    recipes = [variant.recipe for variant in plan.variants]
    largest = max(expected_memory(recipe, recipe.transformer_config, device)[0] for recipe in recipes)
    return max(1, int(free // (largest + PROCESS_OVERHEAD_BYTES)))


def _poll_jobs(jobs: list[_RunningJob], on_progress: ProgressFn) -> None:
    """Wait at most half a second for a message or for the end of a process, and handle the messages.

    Raises InputError if a worker reports an error.
    """
    ready = connection.wait([*(job.pipe for job in jobs), *(job.process.sentinel for job in jobs)], timeout=0.5)
    for job in jobs:
        while job.pipe in ready and job.pipe.poll():
            try:
                kind, value = job.pipe.recv()
            except EOFError:  # the process has ended
                break
            if kind == "step":
                on_progress(job.name, value)
            elif kind == "error":
                raise InputError(f"{job.name}: {value}")
            else:
                job.finished = value


def _check_finished(job: _RunningJob) -> None:
    job.process.join()
    if job.finished:
        return
    if job.finished is False:
        raise AblationStoppedError
    raise InputError(
        f"the process of {job.name} died (exit code {job.process.exitcode}), possibly out of memory; repeat the command"
        " to resume, with a lower --jobs if memory was the cause"
    )


def _terminate_jobs(jobs: list[_RunningJob]) -> None:
    """Send SIGTERM to each worker, which then saves a checkpoint after its current step. Wait until all have ended."""
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        job.process.join()
