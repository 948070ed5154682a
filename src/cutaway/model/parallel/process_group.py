"""The processes of a tensor-parallel model: ranks, collectives, and what rank 0 tells the others."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from cutaway.errors import CutawayError, InputError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # PyTorch built without distributed has no Store

T = TypeVar("T")
TIMEOUT_ENV = "CUTAWAY_DIST_TIMEOUT"
"""Environment variable with the timeout of collectives in seconds. Default: 600."""
IDLE_TIMEOUT = timedelta(days=365)
"""Timeout of a worker that waits for the next message of rank 0. If rank 0 ends, the wait ends at once."""


class RankFailedError(CutawayError):
    """Another process of the process group has failed, or did not respond before the timeout."""


class TensorParallel:
    """The ranks that hold one model, and their collectives.

    Processes of one script call the model together. With `has_workers`, this is rank 0, which alone runs the
    program, and the other ranks repeat the forward passes of its engines. Collectives are then allowed in `running`
    only, because elsewhere no other rank takes part in them.
    """

    def __init__(self, rank: int, size: int, *, has_workers: bool) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.has_workers = rank, size, has_workers
        self.is_worker = False
        """Whether this rank repeats the forward passes of rank 0."""
        self.num_caches = 0
        self.freed_caches: list[int] = []
        """Number of KV caches that rank 0 has built, and the numbers of those it has released since the last pass."""
        self.lock = threading.RLock()
        self.running_thread: int | None = None
        self.has_failed = False
        self.group = dist.group.WORLD
        self.object_group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)

    def __deepcopy__(self, memo: object) -> "TensorParallel":
        return self  # a copy of a model belongs to the same processes

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context in which all ranks run the same computation. One thread at a time can enter it."""
        with self.lock:
            if self.has_failed:
                raise RankFailedError("an earlier step failed on one of the processes; restart all processes")
            before, self.running_thread = self.running_thread, threading.get_ident()
            try:
                yield
            except Exception as error:
                self.has_failed = True
                if is_collective_error(error):
                    raise rank_failed_error(error) from error
                raise
            finally:
                self.running_thread = before

    def _check_running(self) -> None:
        if self.has_workers and self.running_thread != threading.get_ident():
            raise InputError(
                f"the model is split over {self.size} processes, which run the steps of text generation only; load it"
                " on one device for anything else"
            )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        import torch.distributed as dist

        self._check_running()
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenation of the tensors of all ranks, which have equal shapes."""
        import torch.distributed as dist

        self._check_running()
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim)

    def broadcast(self, x: Tensor) -> Tensor:
        """The tensor of rank 0, in place."""
        import torch.distributed as dist

        self._check_running()
        dist.broadcast(x, 0, group=self.group)
        return x

    def broadcast_object(self, value: T) -> T:
        """The value of rank 0, which can be any picklable object. The other ranks wait for it without a time limit."""
        import torch.distributed as dist

        values = [value]
        try:
            dist.broadcast_object_list(values, 0, group=self.object_group)
        except Exception as error:
            if is_collective_error(error):
                raise rank_failed_error(error) from error
            raise
        return values[0]

    def split(self, count: int) -> range:
        """This rank's part of the indices 0 … count − 1. The parts of two ranks differ by at most one in size."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)


_tensor_parallel: TensorParallel | None = None


def get_tensor_parallel(size: int, device: torch.device) -> TensorParallel:
    """Return the ranks of this process. On the first call, join the processes that torchrun has started."""
    if _tensor_parallel is None:
        join_processes(device)
    assert _tensor_parallel is not None
    if _tensor_parallel.size != size:
        raise InputError(
            f"tensor_parallel_size is {size}, but {_tensor_parallel.size} processes are running; pass"
            f" {_tensor_parallel.size}, or start {size} processes"
        )
    return _tensor_parallel


def join_processes(
    device: torch.device,
    *,
    store: "Store | None" = None,
    rank: int | None = None,
    world_size: int | None = None,
    has_workers: bool = False,
) -> TensorParallel:
    """Initialize the process group, from torchrun's environment variables where arguments are None."""
    global _tensor_parallel
    import torch.distributed as dist

    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    if world_size < 2:
        raise InputError(
            "tensor parallelism needs several processes, but this is the only one; start the script with torchrun"
            " --nproc-per-node N, or use cutaway generate --devices N"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=collective_timeout())
    _tensor_parallel = TensorParallel(rank, world_size, has_workers=has_workers and rank == 0)
    return _tensor_parallel


def rank_device(device: torch.device) -> torch.device:
    """The device of this rank: on a machine with several GPUs, the one with the number of the process."""
    if device.type != "cuda":
        return device
    local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= count:
        raise InputError(
            f"this machine has {count} GPUs, too few for one per process; start at most {count} processes, or use the"
            " device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_not_split(model: nn.Module, action: str) -> None:
    """Raise InputError if this process has only a part of the model. `action` is what needs the whole model."""
    ranks: TensorParallel | None = getattr(model, "tensor_parallel", None)
    if ranks is not None:
        raise InputError(
            f"{action} needs the whole model, but this process has one of {ranks.size} parts; load it without"
            " tensor_parallel_size"
        )


def collective_timeout() -> timedelta:
    """Time after which a collective fails, if another process does not respond."""
    return timedelta(seconds=float(os.environ.get(TIMEOUT_ENV, "600")))


def rank_failed_error(error: Exception) -> RankFailedError:
    return RankFailedError(
        f"another process failed, or did not respond for {collective_timeout().total_seconds():.0f} s"
        f" ({backend_message(error)}); restart all processes"
    )


def is_collective_error(error: Exception) -> bool:
    """Whether the error comes from a collective. Collectives fail on the remaining ranks after another rank failed."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "ncclUnhandled"))
    )


def backend_message(error: Exception) -> str:
    """First sentence of the error message of the communication backend, without the source location."""
    return re.sub(r"^\[.*?\] ", "", str(error).split("\n")[0]).split(". ")[0]
