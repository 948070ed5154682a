"""Carries out runs by several processes, as torchrun would start them. torch is imported once: the processes are forks.

Reads a job a line: {"world_size": 2, "recipe": a recipe, "run": a directory, …}; answers with each one's exit status.
With "gradients", one step's gradients are written there, whole, in the place of a run. "failpoints" go by rank;
"stop" is a rank and the step in which it is asked to; with "disk_full", nothing can be saved.
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
from cutaway.train.recipe.load import load_recipe
from cutaway.train.trainer.launch import prepare_trainer, resume_trainer
from cutaway.train.trainer.train_step import metrics_to_python
from cutaway.train.trainer.trainer import Trainer

MAX_SECONDS = 120
"""Seconds after which processes that hang are ended."""


def write_gradients(trainer: Trainer, file: str) -> None:
    found: dict[str, torch.Tensor] = {}

    def keep(lr_factor: float, **kwargs: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if parameter.grad is not None:
                found[name] = full_tensor(parameter.grad).clone()

    trainer.optimizer.step = keep  # type: ignore[method-assign]
    trainer.model.train()
    row = metrics_to_python(trainer.train_step(0))
    found |= {"row": torch.tensor([row["loss"], row["grad_norm"], row["num_tokens"]], dtype=torch.float64)}
    if trainer.dist_context.is_main_process:
        save_file(found, file)


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
            plain = trainer.train_step

            def step(number: int) -> dict[str, Any]:
                if number == job["stop"][1]:
                    trainer.stop_requested.set()
                return plain(number)

            trainer.train_step = step  # type: ignore[method-assign]
        if job.get("disk_full"):
            trainer.checkpoint_manager.directory = Path(os.devnull) / "nowhere"
        trainer.train()


for module in (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "cutaway.train.distributed.tensor_parallel",
    "cutaway.train.distributed.process_group",
):
    import_module(module)  # before the forks, of which each would


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
    with Path(f"{job['run']}.{rank}.txt").open("a") as said:
        faulthandler.register(signal.SIGUSR1, said)
        try:
            run_rank(job, rank)
        except CutawayError as error:
            said.write(f"{error}\n")
            status = 2
        except SystemExit as error:
            status = int(str(error.code))
        except BaseException:
            traceback.print_exc(file=said)
            status = 4
    os._exit(status)


def run_job(job: dict[str, Any]) -> list[int]:
    keeper, port = keep_store()
    pids = [fork_rank(job, rank, port) for rank in range(job["world_size"])]
    ended: dict[int, int] = {}
    deadline = time.monotonic() + MAX_SECONDS
    while len(ended) < len(pids):
        for pid in pids:
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = found[1]
            elif pid not in ended and time.monotonic() > deadline:
                os.kill(pid, signal.SIGUSR1)  # where it hangs
                time.sleep(1)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    return [ended[pid] for pid in pids]


def keep_store() -> tuple[int, int]:
    """A process that outlives the others, as torchrun's own does. It has threads, so it is none that forks."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        while True:
            signal.pause()
    with os.fdopen(reading) as said:
        port = int(said.readline())
    os.close(writing)
    return pid, port


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        codes = [os.waitstatus_to_exitcode(status) for status in run_job(json.loads(line))]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


main()
