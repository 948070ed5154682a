"""Batches as a function of a position: one integer says where the data is, and nothing else has to be kept.

Positions count through all epochs. Everyone sees the same order of them, however many share a batch
(`distributed.process_group.rank_positions`).
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
from cutaway.train.data.memmap import TokenSplit
from cutaway.train.data.shuffle import shuffle_indices
from cutaway.train.seeds import derive_seed

TokenIds = NDArray[np.int64]
RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


class PackedBatch(NamedTuple):
    """Sequences, and for each token which document of its sequence it is of, counted from 0."""

    tokens: Int64[Tensor, "B T"]
    document_ids: Int64[Tensor, "B T"]


class Seq2SeqBatch(NamedTuple):
    """Sources and targets, padded on the right; masks are True at real tokens. Targets have a start and an end."""

    source: Int64[Tensor, "B S"]
    source_mask: Bool[Tensor, "B S"]
    target: Int64[Tensor, "B T"]
    target_mask: Bool[Tensor, "B T"]


class PrefixBatch(NamedTuple):
    """Sources with their targets behind them, padded on the right, and how long each source is."""

    tokens: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    prefix_lengths: Int64[Tensor, " B"]


class PositionalDataset(ABC, Generic[RowT, BatchT]):
    """What gives a row for each position, and a batch for some."""

    @property
    @abstractmethod
    def batch_format(self) -> Hashable:
        """Data of equal kinds can be mixed."""

    @abstractmethod
    def get_rows(self, positions: Sequence[int]) -> list[RowT]: ...

    @abstractmethod
    def collate(self, rows: Sequence[RowT]) -> BatchT: ...

    def get_batch_at(self, positions: Sequence[int]) -> BatchT:
        return self.collate(self.get_rows(positions))

    def get_batch(self, first: int, count: int) -> BatchT:
        return self.get_batch_at(range(first, first + count))


class PackedDataset(PositionalDataset[tuple[TokenIds, TokenIds], PackedBatch]):
    """Documents end to end, cut every `seq_len` tokens. A sequence has one token more, which the next begins with.

    So in an epoch every token but the first is told once from those before it, up to the cut at the end.
    """

    def __init__(self, split: TokenSplit, seq_len: int, seed: int, *, shuffle: bool = True) -> None:
        if seq_len < 1:
            raise InputError(f"sequences of {seq_len} tokens hold nothing; give a seq_len of at least 1")
        self.split, self.seq_len, self.seed, self.shuffle = split, seq_len, seed, shuffle
        self.num_sequences = (len(split.tokens) - 1) // seq_len
        """In an epoch."""
        if split.targets is not None:
            raise InputError(
                "pairs of source and target are not packed; use Seq2SeqDataset, or give sources without target_column"
            )
        if self.num_sequences < 1:
            raise InputError(
                f"{len(split.tokens):,} tokens make no sequence of {seq_len} and one to tell; give more text, or a"
                " smaller seq_len"
            )

    @property
    def batch_format(self) -> Hashable:
        return PackedDataset, self.seq_len

    def get_rows(self, positions: Sequence[int]) -> list[tuple[TokenIds, TokenIds]]:
        return [
            self._get_row(i * self.seq_len)
            for i in _sequence_indices(positions, self.num_sequences, self.seed, self.shuffle)
        ]

    def _get_row(self, start: int) -> tuple[TokenIds, TokenIds]:
        end = start + self.seq_len
        first, last = np.searchsorted(self.split.offsets, [start, end], "right")
        border = np.zeros(self.seq_len + 1, np.int64)
        border[self.split.offsets[first:last] - start] = 1
        return self.split.tokens[start : end + 1].astype(np.int64), border.cumsum()

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> PackedBatch:
        shape = (-1, self.seq_len + 1)  # for no rows at all too
        tokens, documents = (np.array([row[part] for row in rows], np.int64).reshape(shape) for part in (0, 1))
        return PackedBatch(torch.from_numpy(tokens), torch.from_numpy(documents))


class Seq2SeqDataset(PositionalDataset[tuple[TokenIds, TokenIds], Seq2SeqBatch]):
    """Sources with their targets, each pair a row."""

    def __init__(
        self,
        split: TokenSplit,
        seed: int,
        *,
        start_id: int,
        pad_id: int = 0,
        max_len: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """`start_id` begins every target. Pairs with more than `max_len` tokens on a side, of text, are left out."""
        if split.targets is None:
            raise InputError(
                "these documents have no targets; name the column that holds them as the source's target_column"
            )
        self.split, self.seed, self.start_id, self.pad_id, self.shuffle = split, seed, start_id, pad_id, shuffle
        longer = np.maximum(split.targets - split.offsets[:-1], split.offsets[1:] - split.targets)
        self.indices = np.flatnonzero(longer <= (np.inf if max_len is None else max_len))
        self.num_sequences = len(self.indices)
        """In an epoch."""
        self.num_skipped = split.num_documents - self.num_sequences
        if not self.num_sequences:
            raise InputError(
                f"of {split.num_documents:,} pairs none has at most {max_len} tokens a side; allow longer ones"
            )

    @property
    def batch_format(self) -> Hashable:
        return Seq2SeqDataset, self.start_id, self.pad_id

    def get_rows(self, positions: Sequence[int]) -> list[tuple[TokenIds, TokenIds]]:
        return [
            self._get_row(int(self.indices[i]))
            for i in _sequence_indices(positions, self.num_sequences, self.seed, self.shuffle)
        ]

    def _get_row(self, index: int) -> tuple[TokenIds, TokenIds]:
        assert self.split.targets is not None
        first, middle, last = self.split.offsets[index], self.split.targets[index], self.split.offsets[index + 1]
        source, target = (self.split.tokens[a:b].astype(np.int64) for a, b in ((first, middle), (middle, last)))
        # A tokenizer may have set the start already; an end alone, which may be the same token, is none.
        begun = len(target) > 1 and target[0] == self.start_id
        return source, target if begun else np.concatenate([[self.start_id], target])

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> Seq2SeqBatch:
        return Seq2SeqBatch(
            *_pad_rows([row[0] for row in rows], self.pad_id), *_pad_rows([row[1] for row in rows], self.pad_id)
        )


class PrefixDataset(PositionalDataset[tuple[TokenIds, TokenIds], PrefixBatch]):
    """Sources with their targets behind them, as a decoder reads them, each pair a row."""

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        seed: int,
        *,
        bos_id: int | None,
        eos_id: int | None,
        pad_id: int,
        shuffle: bool = True,
    ) -> None:
        """Pairs of more than `seq_len` tokens and one to tell are left out."""
        if split.targets is None:
            raise InputError(
                "these documents have no targets; name the column that holds them as the source's target_column"
            )
        self.split, self.seq_len, self.seed, self.shuffle = split, seq_len, seed, shuffle
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.indices = np.flatnonzero(np.diff(split.offsets) <= seq_len + 1)
        self.num_sequences = len(self.indices)
        """In an epoch."""
        if not self.num_sequences:
            raise InputError(f"of {split.num_documents:,} pairs none has at most {seq_len} tokens; allow longer ones")

    @property
    def batch_format(self) -> Hashable:
        return PrefixDataset, self.pad_id

    def get_rows(self, positions: Sequence[int]) -> list[tuple[TokenIds, TokenIds]]:
        return [
            self._get_row(int(self.indices[i]))
            for i in _sequence_indices(positions, self.num_sequences, self.seed, self.shuffle)
        ]

    def _get_row(self, index: int) -> tuple[TokenIds, TokenIds]:
        """A source has no end of its own, and what goes on from it no beginning."""
        assert self.split.targets is not None
        first, middle, last = self.split.offsets[index], self.split.targets[index], self.split.offsets[index + 1]
        source, target = (self.split.tokens[a:b].astype(np.int64) for a, b in ((first, middle), (middle, last)))
        source = source[:-1] if len(source) > 1 and source[-1] == self.eos_id else source
        return source, target[1:] if len(target) > 1 and target[0] == self.bos_id else target

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> PrefixBatch:
        tokens, mask = _pad_rows([np.concatenate(row) for row in rows], self.pad_id)
        return PrefixBatch(tokens, mask, torch.tensor([len(source) for source, _ in rows], dtype=torch.int64))


class MixtureDataset(PositionalDataset[RowT, BatchT]):
    """Several data in proportion to their weights: of any stretch of positions each has its share, give or take few."""

    def __init__(self, datasets: Sequence[tuple[PositionalDataset[RowT, BatchT], float]], seed: int) -> None:
        if not datasets or len({data.batch_format for data, _ in datasets}) > 1:
            raise InputError("a mixture is of data of one kind and length; make its parts alike")
        if not all(math.isfinite(weight) and weight > 0 for _, weight in datasets):
            raise InputError("a mixture's weights are numbers above 0; leave out what is not to be read")
        self.datasets = [data for data, _ in datasets]
        weights = [weight for _, weight in datasets]
        # In whole numbers, which are exact at any position: each part's share of what is left by those before it.
        # None gets nothing, and only the last one all.
        whole = 2**32
        self.shares = [min(max(round(whole * w / sum(weights[i:])), 1), whole - 1) for i, w in enumerate(weights)]
        self.shares[-1] = whole
        self.phases = [derive_seed(seed, i) % 2**32 for i in range(len(weights))]

    @property
    def batch_format(self) -> Hashable:
        return self.datasets[0].batch_format

    def locate(self, position: int) -> tuple[int, int]:
        """Which data a position is of, and which of its positions: how many came before.

        A part with share s has had ⌊p·s + phase⌋ of the first p positions; the others share those that are left.
        """
        for which, (part, phase) in enumerate(zip(self.shares, self.phases, strict=True)):
            before = (position * part + phase) >> 32
            if ((position + 1) * part + phase) >> 32 > before:
                return which, before
            position -= before
        raise AssertionError("the last part's share is all that is left")

    def get_rows(self, positions: Sequence[int]) -> list[RowT]:
        places = [self.locate(_check_position(position)) for position in positions]
        rows: dict[tuple[int, int], RowT] = {}
        for which, data in enumerate(self.datasets):
            own = [place for place in places if place[0] == which]
            rows.update(zip(own, data.get_rows([position for _, position in own]), strict=True))
        return [rows[place] for place in places]

    def collate(self, rows: Sequence[RowT]) -> BatchT:
        return self.datasets[0].collate(rows)


def _check_position(position: int) -> int:
    if position < 0:
        raise InputError(f"position {position} lies before the data; positions count from 0")
    return position


def _sequence_indices(positions: Sequence[int], num_sequences: int, seed: int, shuffle: bool) -> list[int]:
    """Which of `num_sequences` sequences each position is, epoch after epoch."""
    places = np.array([_check_position(position) for position in positions], np.int64)
    epochs, indices = places // num_sequences, places % num_sequences
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            of_it = epochs == epoch
            indices[of_it] = shuffle_indices(indices[of_it], num_sequences, seed, epoch)
    return indices.tolist()


def _pad_rows(rows: Sequence[TokenIds], pad_id: int) -> tuple[Any, Any]:
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    tokens = np.full(mask.shape, pad_id, np.int64)
    if len(rows):
        tokens[mask] = np.concatenate(rows)
    return torch.from_numpy(tokens), torch.from_numpy(mask)
