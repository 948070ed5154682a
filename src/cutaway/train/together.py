"""Several processes that train one model, on PyTorch's process groups: gloo on CPUs, and NCCL beside it on GPUs."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from cutaway.errors import CutawayError, InputError
from cutaway.model.inputs import check_device
from cutaway.train.ranks import Device, Number, Ranks
from cutaway.train.recipe import Parallel

TIMEOUT = "CUTAWAY_TIMEOUT"
"""Seconds that the others are waited for before they are given up; 600 unless set."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
FAILED = "failed"
PATIENCE = 0.05
"""Seconds between two looks whether the leader is ready."""


_last_held: list[object] = []
"""Process groups of work that is done. If DDP were the last to let go of one, it would wait, holding Python's lock, for
gloo's thread, which may wait for that lock to free a tensor."""


class RankError(CutawayError):
    """One of the processes that train together is gone."""


class Together(Ranks):
    """One of several processes. What must wait long goes through their common store, all else through collectives."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.local = int(os.environ.get("LOCAL_RANK", rank))
        self.restarted = int(os.environ.get(RESTARTS, "0")) > 0
        self.data_rank, self.data_ranks = rank, world
        self.readers: dist.ProcessGroup | None = None
        self.copies = self.shards = 1
        self.turns = 0

    @property
    def parts(self) -> int:
        return self.shards * self.tensor_ranks

    def device(self, asked: Device) -> torch.device:
        kind = check_device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.device("cuda", torch.cuda.current_device()) if kind.type == "cuda" else kind

    def arrange(self, parallel: Parallel, device: torch.device) -> None:
        tensor = parallel.tensor
        shards = max(1, self.world // tensor) if parallel.shards == "all" else parallel.shards
        if self.world % (shards * tensor):
            raise InputError(
                f"{self.world} processes cannot share by parallel.shards = {shards} times parallel.tensor = {tensor};"
                f" start a multiple of {shards * tensor}, or change one of the two"
            )
        self.shards, self.tensor_ranks = shards, tensor
        self.copies = self.world // (shards * tensor)
        self.data_ranks, self.data_rank = self.world // tensor, self.rank // tensor
        if shards * tensor > 1:
            places = (self.copies, shards, tensor)
            self.mesh = init_device_mesh(device.type, places, mesh_dim_names=("copies", "shards", "tensor"))
        if tensor > 1:  # of each matrix's parts one, and who has it
            groups = [list(range(part, self.world, tensor)) for part in range(tensor)]
            self.readers = [dist.new_group(group) for group in groups][self.rank % tensor]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The leader, then the first of each machine, then all others: what is made once is there when it is read."""
        self.turns += 1
        name = f"turn/{self.turns}"
        if not self.leader:
            self.wait(f"{name}/{0 if self.local == 0 else self.rank - self.local}")
        yield
        self.store.set(f"{name}/{self.rank}", "done")

    def from_leader(self, number: int) -> int:
        self.turns += 1
        name = f"number/{self.turns}"
        if self.leader:
            self.store.set(name, str(number))
            return number
        self.wait(name)
        return int(self.store.get(name))

    def wait(self, name: str) -> None:
        """However long it takes; but not for one that has failed."""
        while not self.store.check([name]):
            if self.store.check([FAILED]):
                raise SystemExit(1)
            time.sleep(PATIENCE)

    def agree(self, asked: bool) -> bool:
        flag = torch.tensor(int(asked))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def total(self, number: Number) -> Number:
        if isinstance(number, Tensor):
            found = number.detach().clone()
            dist.all_reduce(found, group=self.readers)
            return found
        return float(self.total(torch.tensor(number, dtype=torch.float64)))

    def sum_of_all(self, number: Tensor) -> Tensor:
        found = number.detach().clone()
        dist.all_reduce(found)
        return found

    def first_to_fail(self) -> bool:
        """Whether nobody has failed before, so that the user should hear of this one."""
        try:
            return self.store.compare_set(FAILED, "", str(self.rank)).decode() == str(self.rank)
        except RuntimeError:  # the store has gone with its keeper
            return True


@contextmanager
def joined(device: Device) -> Iterator[Together]:
    """Meet the other processes, as torchrun's environment says; part from them at the end.

    When one fails, only the first says why: the others fail of that.
    """
    seconds = float(os.environ.get(TIMEOUT, "600"))
    patience = timedelta(seconds=seconds)
    on_gpu = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(rendezvous("env://", timeout=patience))
    # torchrun may keep the store over restarts, and what the dead have left there.
    store = PrefixStore(f"cutaway/{os.environ.get(RESTARTS, '0')}", store)
    how = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(how, store=store, rank=rank, world_size=world, timeout=patience)
    _last_held.append(dist.group.WORLD)
    ranks = Together(store, rank, world)
    try:
        yield ranks
    except Exception as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one is gone: there is more to say
        if not ranks.first_to_fail():
            raise SystemExit(1) from None
        if is_parting(error):
            raise RankError(
                f"another process is gone, or said nothing for {seconds:.0f} s ({reason(error)}); start all of them"
                " again, with --resume"
            ) from error
        if isinstance(error, CutawayError) and rank > 0:
            error.args = (f"process {rank}: {error}",)
        raise
    dist.destroy_process_group()


def is_parting(error: Exception) -> bool:
    """Whether a collective failed, which happens to those that are left."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ncclUnhandled"))
    )


def reason(error: Exception) -> str:
    """What a backend says, without where it says so."""
    return re.sub(r"^\[.*?\] ", "", str(error).split("\n")[0]).split(". ")[0]
