"""Batches as a function of a position: one integer says where the data is, and nothing else has to be kept.

Positions count through all epochs. Everyone sees the same order of them, however many share a batch (`share`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy.typing import NDArray
from torch import Tensor

from cutaway.errors import InputError
from cutaway.train.data.arrays import Split
from cutaway.train.data.order import permuted_all
from cutaway.train.seeds import mixed

Ids = NDArray[np.int64]
Row = TypeVar("Row")
Gathered = TypeVar("Gathered")


class Batch(NamedTuple):
    """Sequences, and for each token which document of its sequence it is of, counted from 0."""

    tokens: Int64[Tensor, "B T"]
    documents: Int64[Tensor, "B T"]


class PairBatch(NamedTuple):
    """Sources and targets, padded on the right; masks are True at real tokens. Targets have a start and an end."""

    source: Int64[Tensor, "B S"]
    source_mask: Bool[Tensor, "B S"]
    target: Int64[Tensor, "B T"]
    target_mask: Bool[Tensor, "B T"]


class JoinedBatch(NamedTuple):
    """Sources with their targets behind them, padded on the right, and how long each source is."""

    tokens: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    lengths: Int64[Tensor, " B"]


def share(first: int, count: int, rank: int, world: int) -> range:
    """The positions of a batch that are one rank's: all ranks' together are the batch."""
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} is none of 0 … {world - 1}; give the rank and the number of ranks")
    return range(first + count * rank // world, first + count * (rank + 1) // world)


class Data(ABC, Generic[Row, Gathered]):
    """What gives a row for each position, and a batch for some."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Data of equal kinds can be mixed."""

    @abstractmethod
    def rows(self, positions: Sequence[int]) -> list[Row]: ...

    @abstractmethod
    def gather(self, rows: Sequence[Row]) -> Gathered: ...

    def at(self, positions: Sequence[int]) -> Gathered:
        return self.gather(self.rows(positions))

    def batch(self, first: int, count: int) -> Gathered:
        return self.at(range(first, first + count))


class Packed(Data[tuple[Ids, Ids], Batch]):
    """Documents end to end, cut every `length` tokens. A sequence has one token more, which the next begins with.

    So in an epoch every token but the first is told once from those before it, up to the cut at the end.
    """

    def __init__(self, split: Split, length: int, seed: int, *, shuffle: bool = True) -> None:
        if length < 1:
            raise InputError(f"sequences of {length} tokens hold nothing; give a length of at least 1")
        self.split, self.length, self.seed, self.shuffle = split, length, seed, shuffle
        self.sequences = (len(split.tokens) - 1) // length
        """In an epoch."""
        if split.targets is not None:
            raise InputError("pairs of source and target are not packed; use Pairs, or give sources without target")
        if self.sequences < 1:
            raise InputError(
                f"{len(split.tokens):,} tokens make no sequence of {length} and one to tell; give more text, or a"
                " smaller length"
            )

    @property
    def kind(self) -> Hashable:
        return Packed, self.length

    def rows(self, positions: Sequence[int]) -> list[tuple[Ids, Ids]]:
        return [self._row(i * self.length) for i in _picked(positions, self.sequences, self.seed, self.shuffle)]

    def _row(self, start: int) -> tuple[Ids, Ids]:
        end = start + self.length
        first, last = np.searchsorted(self.split.offsets, [start, end], "right")
        border = np.zeros(self.length + 1, np.int64)
        border[self.split.offsets[first:last] - start] = 1
        return self.split.tokens[start : end + 1].astype(np.int64), border.cumsum()

    def gather(self, rows: Sequence[tuple[Ids, Ids]]) -> Batch:
        shape = (-1, self.length + 1)  # for no rows at all too
        tokens, documents = (np.array([row[part] for row in rows], np.int64).reshape(shape) for part in (0, 1))
        return Batch(torch.from_numpy(tokens), torch.from_numpy(documents))


class Pairs(Data[tuple[Ids, Ids], PairBatch]):
    """Sources with their targets, each pair a row."""

    def __init__(
        self, split: Split, seed: int, *, start: int, pad: int = 0, longest: int | None = None, shuffle: bool = True
    ) -> None:
        """`start` begins every target. Pairs with more than `longest` tokens on a side, of text, are left out."""
        if split.targets is None:
            raise InputError("these documents have no targets; name the column that holds them as the source's target")
        self.split, self.seed, self.start, self.pad, self.shuffle = split, seed, start, pad, shuffle
        longer = np.maximum(split.targets - split.offsets[:-1], split.offsets[1:] - split.targets)
        self.kept = np.flatnonzero(longer <= (np.inf if longest is None else longest))
        self.sequences = len(self.kept)
        """In an epoch."""
        self.left_out = split.documents - self.sequences
        if not self.sequences:
            raise InputError(
                f"of {split.documents:,} pairs none has at most {longest} tokens a side; allow longer ones"
            )

    @property
    def kind(self) -> Hashable:
        return Pairs, self.start, self.pad

    def rows(self, positions: Sequence[int]) -> list[tuple[Ids, Ids]]:
        return [self._row(int(self.kept[i])) for i in _picked(positions, self.sequences, self.seed, self.shuffle)]

    def _row(self, number: int) -> tuple[Ids, Ids]:
        assert self.split.targets is not None
        first, middle, last = self.split.offsets[number], self.split.targets[number], self.split.offsets[number + 1]
        source, target = (self.split.tokens[a:b].astype(np.int64) for a, b in ((first, middle), (middle, last)))
        # A tokenizer may have set the start already; an end alone, which may be the same token, is none.
        begun = len(target) > 1 and target[0] == self.start
        return source, target if begun else np.concatenate([[self.start], target])

    def gather(self, rows: Sequence[tuple[Ids, Ids]]) -> PairBatch:
        return PairBatch(*_padded([row[0] for row in rows], self.pad), *_padded([row[1] for row in rows], self.pad))


class Joined(Data[tuple[Ids, Ids], JoinedBatch]):
    """Sources with their targets behind them, as a decoder reads them, each pair a row."""

    def __init__(
        self, split: Split, length: int, seed: int, *, bos: int | None, eos: int | None, pad: int, shuffle: bool = True
    ) -> None:
        """Pairs of more than `length` tokens and one to tell are left out."""
        if split.targets is None:
            raise InputError("these documents have no targets; name the column that holds them as the source's target")
        self.split, self.length, self.seed, self.shuffle = split, length, seed, shuffle
        self.bos, self.eos, self.pad = bos, eos, pad
        self.kept = np.flatnonzero(np.diff(split.offsets) <= length + 1)
        self.sequences = len(self.kept)
        """In an epoch."""
        if not self.sequences:
            raise InputError(f"of {split.documents:,} pairs none has at most {length} tokens; allow longer ones")

    @property
    def kind(self) -> Hashable:
        return Joined, self.pad

    def rows(self, positions: Sequence[int]) -> list[tuple[Ids, Ids]]:
        return [self._row(int(self.kept[i])) for i in _picked(positions, self.sequences, self.seed, self.shuffle)]

    def _row(self, number: int) -> tuple[Ids, Ids]:
        """A source has no end of its own, and what goes on from it no beginning."""
        assert self.split.targets is not None
        first, middle, last = self.split.offsets[number], self.split.targets[number], self.split.offsets[number + 1]
        source, target = (self.split.tokens[a:b].astype(np.int64) for a, b in ((first, middle), (middle, last)))
        source = source[:-1] if len(source) > 1 and source[-1] == self.eos else source
        return source, target[1:] if len(target) > 1 and target[0] == self.bos else target

    def gather(self, rows: Sequence[tuple[Ids, Ids]]) -> JoinedBatch:
        tokens, mask = _padded([np.concatenate(row) for row in rows], self.pad)
        return JoinedBatch(tokens, mask, torch.tensor([len(source) for source, _ in rows], dtype=torch.int64))


class Mixture(Data[Row, Gathered]):
    """Several data in proportion to their weights: of any stretch of positions each has its share, give or take few."""

    def __init__(self, parts: Sequence[tuple[Data[Row, Gathered], float]], seed: int) -> None:
        if not parts or len({data.kind for data, _ in parts}) > 1:
            raise InputError("a mixture is of data of one kind and length; make its parts alike")
        if not all(math.isfinite(weight) and weight > 0 for _, weight in parts):
            raise InputError("a mixture's weights are numbers above 0; leave out what is not to be read")
        self.parts = [data for data, _ in parts]
        weights = [weight for _, weight in parts]
        # In whole numbers, which are exact at any position: each part's share of what is left by those before it.
        # None gets nothing, and only the last one all.
        whole = 2**32
        self.shares = [min(max(round(whole * w / sum(weights[i:])), 1), whole - 1) for i, w in enumerate(weights)]
        self.shares[-1] = whole
        self.phases = [mixed(seed, i) % 2**32 for i in range(len(weights))]

    @property
    def kind(self) -> Hashable:
        return self.parts[0].kind

    def where(self, position: int) -> tuple[int, int]:
        """Which data a position is of, and which of its positions: how many came before.

        A part with share s has had ⌊p·s + phase⌋ of the first p positions; the others share those that are left.
        """
        for which, (part, phase) in enumerate(zip(self.shares, self.phases, strict=True)):
            before = (position * part + phase) >> 32
            if ((position + 1) * part + phase) >> 32 > before:
                return which, before
            position -= before
        raise AssertionError("the last part's share is all that is left")

    def rows(self, positions: Sequence[int]) -> list[Row]:
        places = [self.where(_counted(position)) for position in positions]
        rows: dict[tuple[int, int], Row] = {}
        for which, data in enumerate(self.parts):
            own = [place for place in places if place[0] == which]
            rows.update(zip(own, data.rows([position for _, position in own]), strict=True))
        return [rows[place] for place in places]

    def gather(self, rows: Sequence[Row]) -> Gathered:
        return self.parts[0].gather(rows)


def _counted(position: int) -> int:
    if position < 0:
        raise InputError(f"position {position} lies before the data; positions count from 0")
    return position


def _picked(positions: Sequence[int], size: int, seed: int, shuffle: bool) -> list[int]:
    """Which of `size` sequences each position is, epoch after epoch."""
    places = np.array([_counted(position) for position in positions], np.int64)
    epochs, indices = places // size, places % size
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            of_it = epochs == epoch
            indices[of_it] = permuted_all(indices[of_it], size, seed, epoch)
    return indices.tolist()


def _padded(rows: Sequence[Ids], pad: int) -> tuple[Any, Any]:
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    tokens = np.full(mask.shape, pad, np.int64)
    if len(rows):
        tokens[mask] = np.concatenate(rows)
    return torch.from_numpy(tokens), torch.from_numpy(mask)
