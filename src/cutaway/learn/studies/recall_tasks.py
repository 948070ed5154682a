"""Tasks that need an earlier token: copying after a gap, and associative recall."""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.learn.studies.train_grid import TrainingGrid

COPY_GAPS = (4, 16, 64)
RECALL_PAIRS = (4, 8, 16)
LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
COPY_GRID = TrainingGrid(lrs=LRS, warmups=(50,), steps=1000, batch_size=32)
RECALL_GRID = replace(COPY_GRID, steps=1500)
EVAL_SEED = 10_000


class Task(Protocol):
    """Sequences of tokens. The last positions have targets, which are at known distances."""

    num_symbols: ClassVar[int]

    @property
    def key(self) -> str: ...
    @property
    def baseline(self) -> float:
        """Expected accuracy of the best answer that does not depend on the copied or recalled token."""
        ...

    @property
    def length(self) -> int: ...
    @property
    def grid(self) -> TrainingGrid: ...
    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor: ...
    def targets(self, tokens: Tensor) -> Tensor:
        """(B, n): the targets of the last n positions."""
        ...

    def distances(self, tokens: Tensor) -> Tensor:
        """(B, n): number of positions from each of the last n positions back to its target."""
        ...


@dataclass(frozen=True)
class CopyTask:
    """Random symbols, a gap of blanks, then cues: the targets at the cues are the symbols, in order."""

    gap: int
    num_symbols: ClassVar[int] = 16
    num_copied: ClassVar[int] = 4

    @property
    def key(self) -> str:
        return f"copy/{self.gap}"

    @property
    def baseline(self) -> float:
        return 1 / (self.num_symbols - 2)

    @property
    def length(self) -> int:
        return 2 * self.num_copied + self.gap

    @property
    def grid(self) -> TrainingGrid:
        return COPY_GRID

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        blank, cue = self.num_symbols - 2, self.num_symbols - 1
        symbols = torch.randint(blank, (count, self.num_copied), generator=generator)
        blanks = torch.full((count, length - 2 * self.num_copied), blank)
        return torch.cat([symbols, blanks, torch.full_like(symbols, cue)], 1)

    def targets(self, tokens: Tensor) -> Tensor:
        return tokens[:, : self.num_copied]

    def distances(self, tokens: Tensor) -> Tensor:
        return torch.full_like(self.targets(tokens), self.num_copied + self.gap)


@dataclass(frozen=True)
class RecallTask:
    """Associative recall: pairs of a key and a value, then each key in random order: its target is the value."""

    num_pairs: int
    num_keys: ClassVar[int] = 16
    num_values: ClassVar[int] = 16
    num_symbols: ClassVar[int] = 32

    @property
    def key(self) -> str:
        return f"recall/{self.num_pairs}"

    @property
    def baseline(self) -> float:
        """The most frequent value of the sequence, whatever the key."""
        tokens = self.sample(100_000, self.length, torch.Generator().manual_seed(EVAL_SEED))
        values = F.one_hot(tokens[:, 1 : 2 * self.num_pairs : 2] - self.num_keys, self.num_values)
        return float(values.sum(1).amax(1).double().mean()) / self.num_pairs

    @property
    def length(self) -> int:
        return 3 * self.num_pairs

    @property
    def grid(self) -> TrainingGrid:
        return RECALL_GRID

    def sample(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        keys = torch.rand(count, self.num_keys, generator=generator).argsort(1)[:, : self.num_pairs]
        values = self.num_keys + torch.randint(self.num_values, (count, self.num_pairs), generator=generator)
        order = torch.rand(count, self.num_pairs, generator=generator).argsort(1)
        return torch.cat([torch.stack([keys, values], 2).flatten(1), keys.gather(1, order)], 1)

    def _matches(self, tokens: Tensor) -> Tensor:
        """(B, queries, pairs): whether the query is the key of the pair."""
        return tokens[:, 2 * self.num_pairs :, None] == tokens[:, None, : 2 * self.num_pairs : 2]

    def targets(self, tokens: Tensor) -> Tensor:
        return (self._matches(tokens) * tokens[:, None, 1 : 2 * self.num_pairs : 2]).sum(-1)

    def distances(self, tokens: Tensor) -> Tensor:
        values = torch.arange(1, 2 * self.num_pairs, 2, device=tokens.device)
        queries = torch.arange(2 * self.num_pairs, 3 * self.num_pairs, device=tokens.device)
        return queries - (self._matches(tokens) * values).sum(-1)


def list_tasks() -> list[Task]:
    return [CopyTask(gap) for gap in COPY_GAPS] + [RecallTask(pairs) for pairs in RECALL_PAIRS]
