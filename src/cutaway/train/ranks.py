"""The processes that train one model together, as each of them sees it. One alone is the simple case: all is here."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from cutaway.model.inputs import check_device
from cutaway.train.data.batches import share
from cutaway.train.recipe import Parallel

Number = TypeVar("Number", float, Tensor)
Device = torch.device | str | None


class Ranks:
    """A process that trains alone. `Together` is one of several, and says what differs."""

    rank, world = 0, 1
    data_rank, data_ranks = 0, 1
    """Whose sequences this process reads, and how many read others."""
    tensor_ranks = 1
    """How many share each matrix, and read the same."""
    mesh: Any = None
    """Where states or matrices are shared: PyTorch's mesh of (copies, shards, tensor)."""
    restarted = False
    """Whether whoever started this had to start it again."""

    @property
    def leader(self) -> bool:
        """Whether this is the one that speaks and writes."""
        return self.rank == 0

    @property
    def parts(self) -> int:
        """How many ranks the weights, gradients and the optimiser's state are spread over."""
        return 1

    def device(self, asked: Device) -> torch.device:
        return check_device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))

    def arrange(self, parallel: Parallel, device: torch.device) -> None:
        """Find one's place among the others."""

    def in_turn(self) -> AbstractContextManager[Any]:
        """What the leader must have done before the others do it."""
        return nullcontext()

    def from_leader(self, number: int) -> int:
        """The leader's number, for all."""
        return number

    def agree(self, asked: bool) -> bool:
        """Whether any of them was asked."""
        return asked

    def total(self, number: Number) -> Number:
        """Σ over those that read different sequences."""
        return number

    def sum_of_all(self, number: Tensor) -> Tensor:
        """Σ over all processes."""
        return number

    def portions(self, size: int, pieces: int) -> list[tuple[int, int]]:
        """(low, high) of each piece of this rank's share of a batch. All ranks have as many; some may be empty."""
        mine = share(0, size, self.data_rank, self.data_ranks)
        count = min(pieces, -(-size // self.data_ranks))
        edges = [mine.start + len(mine) * place // count for place in range(count + 1)]
        return list(pairwise(edges))


ALONE = Ranks()


@contextmanager
def together(device: Device = None) -> Iterator[Ranks]:
    """The processes that torchrun has started, until the work is done; or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield ALONE
        return
    from cutaway.train.together import joined

    with joined(device) as ranks:
        yield ranks
