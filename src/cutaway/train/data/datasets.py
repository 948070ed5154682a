"""Datasets indexed by position: packed sequences, source-target pairs, prefix sequences, mixtures.

A batch is a function of positions, which count through all epochs. So one integer is the state of the data, and the
order does not depend on how many ranks share a batch (`distributed.process_group.rank_positions`).
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
    """Packed sequences, and for each token the index of its document within the sequence, from 0."""

    tokens: Int64[Tensor, "B T"]
    document_ids: Int64[Tensor, "B T"]


class Seq2SeqBatch(NamedTuple):
    """Sources and targets, padded on the right; masks are True at real tokens. Targets have start and end tokens."""

    source: Int64[Tensor, "B S"]
    source_mask: Bool[Tensor, "B S"]
    target: Int64[Tensor, "B T"]
    target_mask: Bool[Tensor, "B T"]


class PrefixBatch(NamedTuple):
    """Sources followed by their targets, padded on the right, and the length of each source."""

    tokens: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    prefix_lengths: Int64[Tensor, " B"]


class PositionalDataset(ABC, Generic[RowT, BatchT]):
    """Dataset that returns a row for each position, and a batch for several."""

    @property
    @abstractmethod
    def batch_format(self) -> Hashable:
        """Datasets with equal formats can be mixed."""

    @abstractmethod
    def get_rows(self, positions: Sequence[int]) -> list[RowT]: ...

    @abstractmethod
    def collate(self, rows: Sequence[RowT]) -> BatchT: ...

    def get_batch_at(self, positions: Sequence[int]) -> BatchT:
        return self.collate(self.get_rows(positions))

    def get_batch(self, first: int, count: int) -> BatchT:
        return self.get_batch_at(range(first, first + count))


class PackedDataset(PositionalDataset[tuple[TokenIds, TokenIds], PackedBatch]):
    """Concatenated documents in sequences of `seq_len` + 1 tokens; the last token is also the first of the next.

    So in an epoch every token except the first is a target once, up to the remainder at the end.
    """

    def __init__(self, split: TokenSplit, seq_len: int, seed: int, *, shuffle: bool = True) -> None:
        if seq_len < 1:
            raise InputError(f"seq_len is {seq_len}; it is a number of tokens, so pass 1 or more")
        self.split, self.seq_len, self.seed, self.shuffle = split, seq_len, seed, shuffle
        self.num_sequences = (len(split.tokens) - 1) // seq_len
        """Sequences per epoch"""
        if split.targets is not None:
            raise InputError(
                "source-target pairs cannot be packed; use Seq2SeqDataset, or remove target_column from the sources"
            )
        if self.num_sequences < 1:
            raise InputError(
                f"{len(split.tokens):,} tokens are less than one sequence of {seq_len} and its last target; use more"
                " text, or lower seq_len"
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
        """Tokens of the sequence that starts at token `start`, and the document index of each."""
        end = start + self.seq_len
        first, last = np.searchsorted(self.split.offsets, [start, end], "right")
        is_document_start = np.zeros(self.seq_len + 1, np.int64)
        is_document_start[self.split.offsets[first:last] - start] = 1
        return self.split.tokens[start : end + 1].astype(np.int64), is_document_start.cumsum()

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> PackedBatch:
        shape = (-1, self.seq_len + 1)  # also for an empty list of rows
        tokens, document_ids = (np.array([row[i] for row in rows], np.int64).reshape(shape) for i in (0, 1))
        return PackedBatch(torch.from_numpy(tokens), torch.from_numpy(document_ids))


class Seq2SeqDataset(PositionalDataset[tuple[TokenIds, TokenIds], Seq2SeqBatch]):
    """Source-target pairs, one pair per row."""

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
        """`start_id` starts every target. Pairs whose source or target exceeds `max_len` tokens are skipped."""
        if split.targets is None:
            raise InputError(
                "the documents have no targets; set target_column of the source to the column that has them"
            )
        self.split, self.seed, self.start_id, self.pad_id, self.shuffle = split, seed, start_id, pad_id, shuffle
        lengths = np.maximum(split.targets - split.offsets[:-1], split.offsets[1:] - split.targets)
        self.indices = np.flatnonzero(lengths <= (np.inf if max_len is None else max_len))
        self.num_sequences = len(self.indices)
        """Pairs per epoch"""
        self.num_skipped = split.num_documents - self.num_sequences
        if not self.num_sequences:
            raise InputError(
                f"all {split.num_documents:,} pairs have a source or target longer than {max_len} tokens; increase it"
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
        # A tokenizer may have added the start token; a target of one token is only EOS, which may have the same id.
        has_start = len(target) > 1 and target[0] == self.start_id
        return source, target if has_start else np.concatenate([[self.start_id], target])

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> Seq2SeqBatch:
        return Seq2SeqBatch(
            *_pad_rows([row[0] for row in rows], self.pad_id), *_pad_rows([row[1] for row in rows], self.pad_id)
        )


class PrefixDataset(PositionalDataset[tuple[TokenIds, TokenIds], PrefixBatch]):
    """Sources followed by their targets, for a decoder, one pair per row."""

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
        """Pairs longer than `seq_len` inputs and one target are skipped."""
        if split.targets is None:
            raise InputError(
                "the documents have no targets; set target_column of the source to the column that has them"
            )
        self.split, self.seq_len, self.seed, self.shuffle = split, seq_len, seed, shuffle
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id
        self.indices = np.flatnonzero(np.diff(split.offsets) <= seq_len + 1)
        self.num_sequences = len(self.indices)
        """Pairs per epoch"""
        if not self.num_sequences:
            raise InputError(f"all {split.num_documents:,} pairs are longer than {seq_len} tokens; increase seq_len")

    @property
    def batch_format(self) -> Hashable:
        return PrefixDataset, self.pad_id

    def get_rows(self, positions: Sequence[int]) -> list[tuple[TokenIds, TokenIds]]:
        return [
            self._get_row(int(self.indices[i]))
            for i in _sequence_indices(positions, self.num_sequences, self.seed, self.shuffle)
        ]

    def _get_row(self, index: int) -> tuple[TokenIds, TokenIds]:
        """Source without EOS and target without BOS."""
        assert self.split.targets is not None
        first, middle, last = self.split.offsets[index], self.split.targets[index], self.split.offsets[index + 1]
        source, target = (self.split.tokens[a:b].astype(np.int64) for a, b in ((first, middle), (middle, last)))
        source = source[:-1] if len(source) > 1 and source[-1] == self.eos_id else source
        return source, target[1:] if len(target) > 1 and target[0] == self.bos_id else target

    def collate(self, rows: Sequence[tuple[TokenIds, TokenIds]]) -> PrefixBatch:
        tokens, mask = _pad_rows([np.concatenate(row) for row in rows], self.pad_id)
        return PrefixBatch(tokens, mask, torch.tensor([len(source) for source, _ in rows], dtype=torch.int64))


class MixtureDataset(PositionalDataset[RowT, BatchT]):
    """Mixture in proportion to weights: any interval of positions has each dataset's share, to within a few rows."""

    def __init__(self, datasets: Sequence[tuple[PositionalDataset[RowT, BatchT], float]], seed: int) -> None:
        if not datasets or len({data.batch_format for data, _ in datasets}) > 1:
            raise InputError("the datasets of a mixture must have the same kind, seq_len and special ids; align them")
        if not all(math.isfinite(weight) and weight > 0 for _, weight in datasets):
            raise InputError("weights of a mixture must be positive and finite; remove datasets that are not needed")
        self.datasets = [data for data, _ in datasets]
        weights = [weight for _, weight in datasets]
        # Fixed point with 32 bits, exact at any position: each dataset's share of what those before it leave. Every
        # share is at least 1, and only the last is the whole.
        one = 2**32
        self.shares = [min(max(round(one * w / sum(weights[i:])), 1), one - 1) for i, w in enumerate(weights)]
        self.shares[-1] = one
        self.phases = [derive_seed(seed, i) % 2**32 for i in range(len(weights))]

    @property
    def batch_format(self) -> Hashable:
        return self.datasets[0].batch_format

    def locate(self, position: int) -> tuple[int, int]:
        """Return the index of the dataset of a position, and the position within that dataset.

        A dataset with share s has ⌊p·s + phase⌋ of the first p positions; the following datasets share the rest.
        """
        for index, (share, phase) in enumerate(zip(self.shares, self.phases, strict=True)):
            num_before = (position * share + phase) >> 32
            if ((position + 1) * share + phase) >> 32 > num_before:
                return index, num_before
            position -= num_before
        raise AssertionError("the last dataset has all remaining positions")

    def get_rows(self, positions: Sequence[int]) -> list[RowT]:
        locations = [self.locate(_check_position(position)) for position in positions]
        rows: dict[tuple[int, int], RowT] = {}
        for index, dataset in enumerate(self.datasets):
            own = [location for location in locations if location[0] == index]
            rows.update(zip(own, dataset.get_rows([position for _, position in own]), strict=True))
        return [rows[location] for location in locations]

    def collate(self, rows: Sequence[RowT]) -> BatchT:
        return self.datasets[0].collate(rows)


def _check_position(position: int) -> int:
    if position < 0:
        raise InputError(f"position is {position}; positions start at 0, so pass 0 or more")
    return position


def _sequence_indices(positions: Sequence[int], num_sequences: int, seed: int, shuffle: bool) -> list[int]:
    """Sequence index of each position, shuffled per epoch."""
    checked = np.array([_check_position(position) for position in positions], np.int64)
    epochs, indices = checked // num_sequences, checked % num_sequences
    if shuffle:
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            indices[in_epoch] = shuffle_indices(indices[in_epoch], num_sequences, seed, epoch)
    return indices.tolist()


def _pad_rows(rows: Sequence[TokenIds], pad_id: int) -> tuple[Any, Any]:
    """Pad rows on the right; returns tokens and mask, both (rows, longest row)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    tokens = np.full(mask.shape, pad_id, np.int64)
    if len(rows):
        tokens[mask] = np.concatenate(rows)
    return torch.from_numpy(tokens), torch.from_numpy(mask)
