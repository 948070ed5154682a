"""Process groups and device mesh: DistributedContext for a single process, MultiProcessContext under torchrun."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cutaway.argument_checks import resolve_device
from cutaway.errors import CutawayError, InputError
from cutaway.model.parallel.process_group import (
    RankFailedError,
    backend_message,
    collective_timeout,
    is_collective_error,
)
from cutaway.train.recipe.schema import ParallelConfig

if TYPE_CHECKING:  # PyTorch built without distributed has no Store
    from torch.distributed import Store  # type: ignore[attr-defined]

NumberT = TypeVar("NumberT", float, Tensor)
DeviceLike = torch.device | str | None

RESTART_COUNT_ENV = "TORCHELASTIC_RESTART_COUNT"
FAILED_KEY = "failed"
POLL_SECONDS = 0.05
"""Time between two queries of the key-value store, in seconds."""
_retained_groups: list[object] = []
"""References to process groups that are no longer used, to prevent a deadlock. If DDP released the last reference, it
would wait for gloo's thread while holding the GIL, and that thread may wait for the GIL to free a tensor."""


class DistributedContext:
    """Ranks, device mesh and collectives of a single process. `MultiProcessContext` is for several processes."""

    rank, world_size = 0, 1
    dp_rank, dp_size = 0, 1
    """Data-parallel rank and size. Different data-parallel ranks process different sequences."""
    tp_size = 1
    """Tensor-parallel size: the number of ranks that split each matrix and process the same sequences."""
    mesh: DeviceMesh | None = None
    """Mesh with the dimensions (dp_replicate, dp_shard, tp). None if neither state nor matrices are sharded."""
    is_restart = False
    """Whether torchrun restarted this process after a failure."""

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the only rank that logs and writes files."""
        return self.rank == 0

    @property
    def num_state_shards(self) -> int:
        """Number of ranks over which weights, gradients and optimizer state are sharded."""
        return 1

    def resolve_device(self, device: DeviceLike) -> torch.device:
        return resolve_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def init_mesh(self, parallel: ParallelConfig, device: torch.device) -> None:
        """Set up the device mesh and this rank's coordinates in it."""

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager whose body the main process completes before the other ranks start it."""
        return nullcontext()

    def broadcast_int(self, value: int) -> int:
        """Return the value of the main process on all ranks."""
        return value

    def any_rank(self, condition: bool) -> bool:
        """Whether the condition holds on any rank."""
        return condition

    def sum_over_dp(self, value: NumberT) -> NumberT:
        """Return the sum of `value` over the data-parallel ranks."""
        return value

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks."""
        return value

    def micro_batch_ranges(self, batch_size: int, grad_accum_steps: int) -> list[tuple[int, int]]:
        """Ranges (low, high) of indices into the batch, one for each micro-batch of this rank.

        All ranks have the same number of ranges. A range may be empty.
        """
        positions = rank_positions(0, batch_size, self.dp_rank, self.dp_size)
        count = min(grad_accum_steps, -(-batch_size // self.dp_size))
        edges = [positions.start + len(positions) * index // count for index in range(count + 1)]
        return list(pairwise(edges))


SINGLE_PROCESS = DistributedContext()


def rank_positions(first: int, count: int, rank: int, world_size: int) -> range:
    """Data positions that a rank processes, of the `count` positions of a batch that start at `first`."""
    return range(first + count * rank // world_size, first + count * (rank + 1) // world_size)


class MultiProcessContext(DistributedContext):
    """Ranks, device mesh and collectives of one of several processes.

    Waits that may be longer than the timeout of collectives use the key-value store.
    """

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
        resolved = super().resolve_device(device)
        return torch.device("cuda", torch.cuda.current_device()) if resolved.type == "cuda" else resolved

    def init_mesh(self, parallel: ParallelConfig, device: torch.device) -> None:
        tp = parallel.tp
        dp_shard = max(1, self.world_size // tp) if parallel.dp_shard == "all" else parallel.dp_shard
        if self.world_size % (dp_shard * tp):
            raise InputError(
                f"{self.world_size} processes are not a multiple of parallel.dp_shard = {dp_shard} times parallel.tp ="
                f" {tp}; start a multiple of {dp_shard * tp} processes, or change one of the two"
            )
        self.dp_shard, self.tp_size = dp_shard, tp
        self.dp_replicate = self.world_size // (dp_shard * tp)
        self.dp_size, self.dp_rank = self.world_size // tp, self.rank // tp
        if dp_shard * tp > 1:
            mesh_shape = (self.dp_replicate, dp_shard, tp)
            self.mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        if tp > 1:  # each group has the ranks that hold the same part of each matrix
            groups = [list(range(tp_rank, self.world_size, tp)) for tp_rank in range(tp)]
            self.dp_group = [dist.new_group(group) for group in groups][self.rank % tp]

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager whose body the main process runs first, then the first rank of each node, then the others.

        So a rank finds the files that the ranks before it have written.
        """
        self.sync_count += 1
        key = f"sync/{self.sync_count}"
        if not self.is_main_process:
            self._wait_for_key(f"{key}/{0 if self.local_rank == 0 else self.rank - self.local_rank}")
        yield
        self.store.set(f"{key}/{self.rank}", "done")

    def broadcast_int(self, value: int) -> int:
        self.sync_count += 1
        key = f"broadcast/{self.sync_count}"
        if self.is_main_process:
            self.store.set(key, str(value))
            return value
        self._wait_for_key(key)
        return int(self.store.get(key))

    def _wait_for_key(self, key: str) -> None:
        """Wait without a time limit until the key-value store has the key. Exit if another rank has failed."""
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
            return self.sum_over_ranks(value, self.dp_group)
        return float(self.sum_over_ranks(torch.tensor(value, dtype=torch.float64), self.dp_group))

    def sum_over_ranks(self, value: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    def is_first_failure(self) -> bool:
        """Record that this rank failed, and return whether it is the first. Only the first failure is reported."""
        try:
            return self.store.compare_set(FAILED_KEY, "", str(self.rank)).decode() == str(self.rank)
        except RuntimeError:  # the process that hosts the store is gone
            return True


@contextmanager
def init_distributed(device: DeviceLike = None) -> Iterator[DistributedContext]:
    """Yield a MultiProcessContext if torchrun started several processes, otherwise SINGLE_PROCESS."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield SINGLE_PROCESS
        return
    with _join_process_group(device) as dist_context:
        yield dist_context


@contextmanager
def _join_process_group(device: DeviceLike) -> Iterator[MultiProcessContext]:
    """Context manager: initialize the process group from torchrun's environment variables, and destroy it on exit.

    When a rank fails, the other ranks fail as a consequence. Only the first failure is reported.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    timeout = collective_timeout()
    on_gpu = SINGLE_PROCESS.resolve_device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # After a restart, torchrun may reuse the store, which still has the keys of the failed processes.
    store = PrefixStore(f"cutaway/{os.environ.get(RESTART_COUNT_ENV, '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    _retained_groups.append(dist.group.WORLD)
    dist_context = MultiProcessContext(store, rank, world_size)
    try:
        yield dist_context
    except Exception as error:
        if threading.current_thread() is threading.main_thread():
            # Ignore SIGTERM, which torchrun sends to all processes when one fails, until the error is reported.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not dist_context.is_first_failure():
            raise SystemExit(1) from None
        if is_collective_error(error):
            raise RankFailedError(
                f"another process failed, or did not respond for {timeout.total_seconds():.0f} s"
                f" ({backend_message(error)}); restart all processes with --resume"
            ) from error
        if isinstance(error, CutawayError) and rank > 0:
            error.args = (f"process {rank}: {error}",)
        raise
    dist.destroy_process_group()
