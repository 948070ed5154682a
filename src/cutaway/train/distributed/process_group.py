"""The processes that train one model together, as each of them sees it. One alone is the simple case: all is here."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cutaway.errors import CutawayError, InputError
from cutaway.model.inputs import resolve_device
from cutaway.train.recipe.schema import ParallelConfig

if TYPE_CHECKING:  # a build of torch without distributed has no stores
    from torch.distributed import Store  # type: ignore[attr-defined]

NumberT = TypeVar("NumberT", float, Tensor)
DeviceLike = torch.device | str | None

TIMEOUT_ENV = "CUTAWAY_DIST_TIMEOUT"
"""Seconds that the others are waited for before they are given up; 600 unless set."""
RESTART_COUNT_ENV = "TORCHELASTIC_RESTART_COUNT"
FAILED_KEY = "failed"
POLL_SECONDS = 0.05
"""Seconds between two looks whether the leader is ready."""
_retained_groups: list[object] = []
"""Process groups of work that is done. If DDP were the last to let go of one, it would wait, holding Python's lock, for
gloo's thread, which may wait for that lock to free a tensor."""


class DistributedContext:
    """A process that trains alone. `MultiProcessContext` is one of several, and says what differs."""

    rank, world_size = 0, 1
    dp_rank, dp_size = 0, 1
    """Whose sequences this process reads, and how many read others."""
    tp_size = 1
    """How many share each matrix, and read the same."""
    mesh: Any = None
    """Where states or matrices are shared: PyTorch's mesh of (dp_replicate, dp_shard, tp)."""
    is_restart = False
    """Whether whoever started this had to start it again."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    @property
    def num_state_shards(self) -> int:
        """How many ranks the weights, gradients and the optimizer's state are spread over."""
        return 1

    def resolve_device(self, device: DeviceLike) -> torch.device:
        return resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def init_mesh(self, parallel: ParallelConfig, device: torch.device) -> None:
        """Find one's place among the others."""

    def main_process_first(self) -> AbstractContextManager[Any]:
        """What the leader must have done before the others do it."""
        return nullcontext()

    def broadcast_int(self, value: int) -> int:
        """The leader's number, for all."""
        return value

    def any_rank(self, condition: bool) -> bool:
        """Whether any of them was asked."""
        return condition

    def sum_over_dp(self, value: NumberT) -> NumberT:
        """Σ over those that read different sequences."""
        return value

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Σ over all processes."""
        return value

    def micro_batch_ranges(self, batch_size: int, grad_accum_steps: int) -> list[tuple[int, int]]:
        """(low, high) of each piece of this rank's share of a batch. All ranks have as many; some may be empty."""
        mine = rank_positions(0, batch_size, self.dp_rank, self.dp_size)
        count = min(grad_accum_steps, -(-batch_size // self.dp_size))
        edges = [mine.start + len(mine) * place // count for place in range(count + 1)]
        return list(pairwise(edges))


SINGLE_PROCESS = DistributedContext()


def rank_positions(first: int, count: int, rank: int, world_size: int) -> range:
    """The positions of a batch that are one rank's: all ranks' together are the batch."""
    if not 0 <= rank < world_size:
        raise InputError(f"rank {rank} is none of 0 … {world_size - 1}; give the rank and the number of ranks")
    return range(first + count * rank // world_size, first + count * (rank + 1) // world_size)


class RankFailedError(CutawayError):
    """One of the processes that train together is gone."""


class MultiProcessContext(DistributedContext):
    """One of several processes. What must wait long goes through their common store, all else through collectives."""

    def __init__(self, store: "Store", rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.is_restart = int(os.environ.get(RESTART_COUNT_ENV, "0")) > 0
        self.dp_rank, self.dp_size = rank, world_size
        self.dp_group: dist.ProcessGroup | None = None
        self.dp_replicate = self.dp_shard = 1
        self.sync_count = 0

    @property
    def num_state_shards(self) -> int:
        return self.dp_shard * self.tp_size

    def resolve_device(self, device: DeviceLike) -> torch.device:
        kind = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.device("cuda", torch.cuda.current_device()) if kind.type == "cuda" else kind

    def init_mesh(self, parallel: ParallelConfig, device: torch.device) -> None:
        tensor = parallel.tp
        shards = max(1, self.world_size // tensor) if parallel.dp_shard == "all" else parallel.dp_shard
        if self.world_size % (shards * tensor):
            raise InputError(
                f"{self.world_size} processes cannot share by parallel.dp_shard = {shards} times parallel.tp ="
                f" {tensor}; start a multiple of {shards * tensor}, or change one of the two"
            )
        self.dp_shard, self.tp_size = shards, tensor
        self.dp_replicate = self.world_size // (shards * tensor)
        self.dp_size, self.dp_rank = self.world_size // tensor, self.rank // tensor
        if shards * tensor > 1:
            places = (self.dp_replicate, shards, tensor)
            self.mesh = init_device_mesh(device.type, places, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        if tensor > 1:  # of each matrix's parts one, and who has it
            groups = [list(range(part, self.world_size, tensor)) for part in range(tensor)]
            self.dp_group = [dist.new_group(group) for group in groups][self.rank % tensor]

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The leader, then the first of each machine, then all others: what is made once is there when it is read."""
        self.sync_count += 1
        name = f"sync/{self.sync_count}"
        if not self.is_main_process:
            self._wait_for_key(f"{name}/{0 if self.local_rank == 0 else self.rank - self.local_rank}")
        yield
        self.store.set(f"{name}/{self.rank}", "done")

    def broadcast_int(self, value: int) -> int:
        self.sync_count += 1
        name = f"broadcast/{self.sync_count}"
        if self.is_main_process:
            self.store.set(name, str(value))
            return value
        self._wait_for_key(name)
        return int(self.store.get(name))

    def _wait_for_key(self, key: str) -> None:
        """However long it takes; but not for one that has failed."""
        while not self.store.check([key]):
            if self.store.check([FAILED_KEY]):
                raise SystemExit(1)
            time.sleep(POLL_SECONDS)

    def any_rank(self, condition: bool) -> bool:
        flag = torch.tensor(int(condition))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def sum_over_dp(self, value: NumberT) -> NumberT:
        if isinstance(value, Tensor):
            found = value.detach().clone()
            dist.all_reduce(found, group=self.dp_group)
            return found
        return float(self.sum_over_dp(torch.tensor(value, dtype=torch.float64)))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        found = value.detach().clone()
        dist.all_reduce(found)
        return found

    def is_first_failure(self) -> bool:
        """Whether nobody has failed before, so that the user should hear of this one."""
        try:
            return self.store.compare_set(FAILED_KEY, "", str(self.rank)).decode() == str(self.rank)
        except RuntimeError:  # the store has gone with its keeper
            return True


@contextmanager
def init_distributed(device: DeviceLike = None) -> Iterator[DistributedContext]:
    """The processes that torchrun has started, until the work is done; or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield SINGLE_PROCESS
        return
    with _join_process_group(device) as ranks:
        yield ranks


@contextmanager
def _join_process_group(device: DeviceLike) -> Iterator[MultiProcessContext]:
    """Meet the other processes, as torchrun's environment says; part from them at the end.

    When one fails, only the first says why: the others fail of that.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    seconds = float(os.environ.get(TIMEOUT_ENV, "600"))
    patience = timedelta(seconds=seconds)
    on_gpu = resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(rendezvous("env://", timeout=patience))
    # torchrun may keep the store over restarts, and what the dead have left there.
    store = PrefixStore(f"cutaway/{os.environ.get(RESTART_COUNT_ENV, '0')}", store)
    how = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(how, store=store, rank=rank, world_size=world, timeout=patience)
    _retained_groups.append(dist.group.WORLD)
    ranks = MultiProcessContext(store, rank, world)
    try:
        yield ranks
    except Exception as error:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all when one is gone: there is more to say
        if not ranks.is_first_failure():
            raise SystemExit(1) from None
        if _is_collective_error(error):
            raise RankFailedError(
                f"another process is gone, or said nothing for {seconds:.0f} s ({_backend_message(error)}); start all"
                " of them again, with --resume"
            ) from error
        if isinstance(error, CutawayError) and rank > 0:
            error.args = (f"process {rank}: {error}",)
        raise
    dist.destroy_process_group()


def _is_collective_error(error: Exception) -> bool:
    """Whether a collective failed, which happens to those that are left."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ncclUnhandled"))
    )


def _backend_message(error: Exception) -> str:
    """What a backend says, without where it says so."""
    return re.sub(r"^\[.*?\] ", "", str(error).split("\n")[0]).split(". ")[0]
