"""Runs training jobs on several processes, as torchrun starts them. The processes are forks: torch is imported once.

Reads one job per line: {"world_size": 2, "recipe": a recipe, "run": a directory, …}; writes the ranks' exit codes.
With "gradients", the full gradients of one step are written to that file instead of training. "failpoints" maps a rank
to its failpoint; "stop" is a rank and the step in which it requests a stop; with "disk_full", no checkpoint can be
written.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from cutaway.errors import CutawayError
from cutaway.train.distributed.dtensor import full_tensor
from cutaway.train.distributed.process_group import init_distributed
from cutaway.train.logging import callbacks
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.train_step import metrics_to_python
from cutaway.train.trainer.trainer import Trainer

MAX_SECONDS = 120
"""Seconds after which hanging processes are killed."""


def write_gradients(trainer: Trainer, file: str) -> None:
    gradients: dict[str, torch.Tensor] = {}

    def record_gradients(lr_factor: float, **kwargs: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = full_tensor(parameter.grad).clone()

    trainer.optimizer.step = record_gradients  # type: ignore[method-assign]
    trainer.model.train()
    metrics = metrics_to_python(trainer.train_step(0))
    values = [metrics["loss"], metrics["grad_norm"], metrics["num_tokens"]]
    gradients |= {"row": torch.tensor(values, dtype=torch.float64)}
    if trainer.dist_context.is_main_process:
        save_file(gradients, file)


def run_rank(job: dict[str, Any], rank: int) -> None:
    run = Path(job["run"])
    with init_distributed("cpu") as dist_context:
        if job.get("resume"):
            trainer = resume_trainer(run, device="cpu", dist_context=dist_context)
        else:
            trainer = prepare_trainer(load_recipe(job["recipe"]), run, device="cpu", dist_context=dist_context)
        if "gradients" in job:
            write_gradients(trainer, job["gradients"])
            return
        if job.get("stop") is not None and job["stop"][0] == rank:
            train_step = trainer.train_step

            def train_step_with_stop(step: int) -> dict[str, Any]:
                if step == job["stop"][1]:
                    trainer.stop_requested.set()
                return train_step(step)

            trainer.train_step = train_step_with_stop  # type: ignore[method-assign]
        if job.get("disk_full"):
            trainer.checkpoint_manager.directory = Path(os.devnull) / "nowhere"
        trainer.train()


for module in (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "cutaway.train.distributed.tensor_parallel",
    "cutaway.train.distributed.process_group",
):
    import_module(module)  # once, before the forks
callbacks.plot_losses = lambda rows, path, title: path.touch()  # takes longer than the training, as in conftest.py


def fork_rank(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world_size"])}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    } | job.get("environment", {})
    if str(rank) in job.get("failpoints", {}):
        os.environ["CUTAWAY_FAILPOINT"] = job["failpoints"][str(rank)]
    status = 0
    with Path(f"{job['run']}.{rank}.txt").open("a") as log:
        faulthandler.register(signal.SIGUSR1, log)
        try:
            run_rank(job, rank)
        except CutawayError as error:
            log.write(f"{error}\n")
            status = 2
        except SystemExit as error:
            status = int(str(error.code))
        except BaseException:
            traceback.print_exc(file=log)
            status = 4
    os._exit(status)


def run_job(job: dict[str, Any]) -> list[int]:
    store_pid, port = start_store()
    pids = [fork_rank(job, rank, port) for rank in range(job["world_size"])]
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + MAX_SECONDS
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses and (waited := os.waitpid(pid, os.WNOHANG))[0]:
                statuses[pid] = waited[1]
            elif pid not in statuses and time.monotonic() > deadline:
                os.kill(pid, signal.SIGUSR1)  # dump the stack of the hanging process
                time.sleep(1)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    os.kill(store_pid, signal.SIGKILL)
    os.waitpid(store_pid, 0)
    return [statuses[pid] for pid in pids]


def start_store() -> tuple[int, int]:
    """Start a process that hosts the store and outlives the ranks, as in torchrun. Return its process id and its port.

    The store has threads, so it does not run in the process that forks the ranks."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, f"{store.port}\n".encode())
        while True:
            signal.pause()
    with os.fdopen(read_end) as pipe:
        port = int(pipe.readline())
    os.close(write_end)
    return pid, port


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        codes = [os.waitstatus_to_exitcode(status) for status in run_job(json.loads(line))]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


main()
