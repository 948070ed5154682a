"""Carries out runs by several processes, as torchrun would start them. torch is imported once: the processes are forks.

Reads a job a line: {"world": 2, "source": a recipe, "run": a directory, …}; answers with each process's exit status.
With "gradients", one step's gradients are written there, whole, in the place of a run. "points" are failpoints by rank;
"stop" is a rank and the step in which it is asked to; with "full", nothing can be saved.
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
from cutaway.train.loop import Loop
from cutaway.train.parts import whole
from cutaway.train.ranks import together
from cutaway.train.recipe import recipe
from cutaway.train.start import begin, go_on
from cutaway.train.step import settled

LONGEST = 120
"""Seconds after which processes that hang are ended."""


def gradients(loop: Loop, file: str) -> None:
    found: dict[str, torch.Tensor] = {}

    def keep(factor: float, **how: Any) -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.grad is not None:
                found[name] = whole(parameter.grad).clone()

    loop.optimiser.step = keep  # type: ignore[method-assign]
    loop.model.train()
    row = settled(loop.step(0))
    found |= {"row": torch.tensor([row["loss"], row["gradient"], row["tokens"]], dtype=torch.float64)}
    if loop.ranks.leader:
        save_file(found, file)


def work(job: dict[str, Any], rank: int) -> None:
    run = Path(job["run"])
    with together("cpu") as ranks:
        how: Any = {"device": "cpu", "ranks": ranks}
        loop = go_on(run, **how) if job.get("resume") else begin(recipe(job["source"]), run, **how)
        if "gradients" in job:
            gradients(loop, job["gradients"])
            return
        if job.get("stop") is not None and job["stop"][0] == rank:
            plain = loop.step

            def step(number: int) -> dict[str, Any]:
                if number == job["stop"][1]:
                    loop.stop.set()
                return plain(number)

            loop.step = step  # type: ignore[method-assign]
        if job.get("full"):
            loop.store.directory = Path(os.devnull) / "nowhere"
        loop.go()


for module in ("torch._dynamo", "torch.distributed.fsdp", "cutaway.train.slicing", "cutaway.train.together"):
    import_module(module)  # before the forks, of which each would


def start(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["world"])}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    } | job.get("environment", {})
    if str(rank) in job.get("points", {}):
        os.environ["CUTAWAY_FAILPOINT"] = job["points"][str(rank)]
    status = 0
    with Path(f"{job['run']}.{rank}.txt").open("a") as said:
        faulthandler.register(signal.SIGUSR1, said)
        try:
            work(job, rank)
        except CutawayError as error:
            said.write(f"{error}\n")
            status = 2
        except SystemExit as error:
            status = int(str(error.code))
        except BaseException:
            traceback.print_exc(file=said)
            status = 4
    os._exit(status)


def carry_out(job: dict[str, Any]) -> list[int]:
    keeper, port = keep_store()
    pids = [start(job, rank, port) for rank in range(job["world"])]
    ended: dict[int, int] = {}
    deadline = time.monotonic() + LONGEST
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
        codes = [os.waitstatus_to_exitcode(status) for status in carry_out(json.loads(line))]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


main()
