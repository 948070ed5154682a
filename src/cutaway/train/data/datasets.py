"""Datasets indexed by position: packed sequences, source-target pairs, prefix sequences, mixtures.

A batch is a function of positions, and positions continue to increase from epoch to epoch. So a single integer is the
whole state of the data, and the order does not depend on the number of ranks that share a batch
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
Row = tuple[TokenIds, ...]
"""Tokens, document ids and `distill` of a packed sequence, or source and target of a pair."""
BatchT = TypeVar("BatchT")


class PackedBatch(NamedTuple):
    """Packed sequences, and for each token the index of its document in the sequence, counted from 0."""

    tokens: Int64[Tensor, "B T"]
    document_ids: Int64[Tensor, "B T"]
    distill: Bool[Tensor, " B"] | None = None
    """`SourceConfig.distill` of each sequence."""


class Seq2SeqBatch(NamedTuple):
    """Sources and targets, padded on the right. A mask is False at padding. Targets have start and end tokens."""

    source: Int64[Tensor, "B S"]
    source_mask: Bool[Tensor, "B S"]
    target: Int64[Tensor, "B T"]
    target_mask: Bool[Tensor, "B T"]


class PrefixBatch(NamedTuple):
    """Sources followed by their targets, padded on the right, and the length of each source."""

    tokens: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    prefix_lengths: Int64[Tensor, " B"]


class PositionalDataset(ABC, Generic[BatchT]):
    """Dataset that returns the rows, or a batch, at given data positions. Positions continue from epoch to epoch."""

    batch_format: Hashable
    """Format of the batches. Datasets with equal formats can be mixed."""

    @abstractmethod
    def get_rows(self, positions: Sequence[int]) -> list[Row]: ...

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> BatchT: ...

    def get_batch_at(self, positions: Sequence[int]) -> BatchT:
        return self.collate(self.get_rows(positions))

    def get_batch(self, first: int, count: int) -> BatchT:
        return self.get_batch_at(range(first, first + count))


Dataset = PositionalDataset[Any]
"""Dataset with any kind of batch. The objective of the run determines the kind."""


class _SplitDataset(PositionalDataset[BatchT]):
    """Dataset of the sequences of one split, training or validation. With `shuffle`, every epoch has a new order."""

    num_sequences: int
    """Number of sequences per epoch."""
    num_skipped: int = 0
    """Number of documents that are left out because they are too long."""

    def __init__(self, split: TokenSplit, seed: int, shuffle: bool) -> None:
        self.split, self.seed, self.shuffle = split, seed, shuffle

    @abstractmethod
    def _get_row(self, index: int) -> Row: ...

    def get_rows(self, positions: Sequence[int]) -> list[Row]:
        checked = np.array([_check_position(position) for position in positions], np.int64)
        epochs, indices = checked // self.num_sequences, checked % self.num_sequences
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                indices[in_epoch] = shuffle_indices(indices[in_epoch], self.num_sequences, self.seed, epoch)
        return [self._get_row(index) for index in indices.tolist()]


class PackedDataset(_SplitDataset[PackedBatch]):
    """Concatenated documents, divided into sequences of `seq_len` + 1 tokens.

    The last token of a sequence is also the first token of the next. So every token except the first is a target once
    per epoch. Tokens at the end that do not fill a sequence are left out.
    """

    def __init__(
        self, split: TokenSplit, seq_len: int, seed: int, *, shuffle: bool = True, distill: bool = True
    ) -> None:
        """`distill`: `SourceConfig.distill` of the source."""
        super().__init__(split, seed, shuffle)
        self.seq_len, self.num_sequences = seq_len, (len(split.tokens) - 1) // seq_len
        self.distill = np.array([distill], np.int64)
        self.batch_format = PackedDataset, seq_len
        if split.targets is not None:
            raise InputError(
                "this objective trains on plain text, but data.sources[].target_column is set; remove it, or set"
                " objective.kind to 'seq2seq' or 'prefix-lm'"
            )
        if self.num_sequences < 1:
            raise InputError(
                f"a split of the data has {len(split.tokens):,} tokens, but one sequence of seq_len = {seq_len} needs"
                f" {seq_len + 1}; use more text, or lower seq_len"
            )

    def _get_row(self, index: int) -> Row:
        """Tokens of a sequence, the document index of each token, and `distill`."""
        start, end = index * self.seq_len, (index + 1) * self.seq_len
        first, last = np.searchsorted(self.split.offsets, [start, end], "right")
        is_document_start = np.zeros(self.seq_len + 1, np.int64)
        is_document_start[self.split.offsets[first:last] - start] = 1
        return self.split.tokens[start : end + 1].astype(np.int64), is_document_start.cumsum(), self.distill

    def collate(self, rows: Sequence[Row]) -> PackedBatch:
        shape = (-1, self.seq_len + 1)  # explicit, because the list of rows may be empty
        tokens, document_ids = (np.array([row[i] for row in rows], np.int64).reshape(shape) for i in (0, 1))
        distill = np.array([row[2] for row in rows], bool).reshape(-1)
        return PackedBatch(*(torch.from_numpy(each) for each in (tokens, document_ids, distill)))


class _PairDataset(_SplitDataset[BatchT]):
    """Dataset of source-target pairs, one per row. Pairs longer than `max_len` tokens are left out."""

    def __init__(self, split: TokenSplit, seed: int, shuffle: bool, pad_id: int, max_len: int | None) -> None:
        super().__init__(split, seed, shuffle)
        if split.targets is None:
            raise InputError(
                "this objective trains on source-target pairs, but the documents have no targets; set"
                " data.sources[].target_column to the name of the column with the targets"
            )
        self.pad_id, self.targets = pad_id, split.targets
        self.indices = np.flatnonzero(self._lengths() <= (np.inf if max_len is None else max_len))
        self.num_sequences = len(self.indices)
        self.num_skipped = split.num_documents - self.num_sequences
        if not self.num_sequences:
            raise InputError(
                f"all {split.num_documents:,} source-target pairs are longer than {max_len} tokens; raise data.seq_len"
            )

    @abstractmethod
    def _lengths(self) -> NDArray[np.int64]:
        """For each pair of the split, the number of tokens that is compared with `max_len`."""

    def _get_pair(self, index: int) -> Row:
        index = self.indices[index]
        first, middle, last = self.split.offsets[index], self.targets[index], self.split.offsets[index + 1]
        source, target = self.split.tokens[first:middle], self.split.tokens[middle:last]
        return source.astype(np.int64), target.astype(np.int64)


class Seq2SeqDataset(_PairDataset[Seq2SeqBatch]):
    """Source-target pairs for an encoder-decoder."""

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
        """`start_id` starts every target. Pairs whose source or target has more than `max_len` tokens are left out."""
        super().__init__(split, seed, shuffle, pad_id, max_len)
        self.start_id, self.batch_format = start_id, (Seq2SeqDataset, start_id, pad_id)

    def _lengths(self) -> NDArray[np.int64]:
        return np.maximum(self.targets - self.split.offsets[:-1], self.split.offsets[1:] - self.targets)

    def _get_row(self, index: int) -> Row:
        source, target = self._get_pair(index)
        # The tokenizer may have added the start token already. A target of one token is EOS alone, not a start token,
        # although both may have the same id.
        has_start = len(target) > 1 and target[0] == self.start_id
        return source, target if has_start else np.concatenate([[self.start_id], target])

    def collate(self, rows: Sequence[Row]) -> Seq2SeqBatch:
        source, target = (_pad_rows([row[i] for row in rows], self.pad_id) for i in (0, 1))
        return Seq2SeqBatch(*source, *target)


class PrefixDataset(_PairDataset[PrefixBatch]):
    """Source-target pairs for a decoder. A row is a source followed by its target."""

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
        """Pairs whose source and target have more than `seq_len` + 1 tokens together are left out."""
        super().__init__(split, seed, shuffle, pad_id, seq_len + 1)
        self.bos_id, self.eos_id, self.batch_format = bos_id, eos_id, (PrefixDataset, pad_id)

    def _lengths(self) -> NDArray[np.int64]:
        return np.diff(self.split.offsets)

    def _get_row(self, index: int) -> Row:
        """Tokens of a source without EOS, and tokens of its target without BOS."""
        source, target = self._get_pair(index)
        source = source[:-1] if len(source) > 1 and source[-1] == self.eos_id else source
        return source, target[1:] if len(target) > 1 and target[0] == self.bos_id else target

    def collate(self, rows: Sequence[Row]) -> PrefixBatch:
        tokens, mask = _pad_rows([np.concatenate(row) for row in rows], self.pad_id)
        return PrefixBatch(tokens, mask, torch.tensor([len(source) for source, _ in rows], dtype=torch.int64))


class MixtureDataset(PositionalDataset[BatchT]):
    """Mixture of datasets, each with a weight.

    In any range of positions, the number of rows from each dataset is proportional to its weight, up to a few rows.
    """

    def __init__(self, datasets: Sequence[tuple[PositionalDataset[BatchT], float]], seed: int) -> None:
        if not datasets or len({data.batch_format for data, _ in datasets}) > 1:
            raise InputError(
                "the datasets of a mixture must have the same kind, seq_len and special token ids, but they differ or"
                " there are none; pass one dataset or more, built with the same arguments"
            )
        if not all(math.isfinite(weight) and weight > 0 for _, weight in datasets):
            raise InputError(
                f"the weights of a mixture must be positive and finite, not {[weight for _, weight in datasets]}; leave"
                " out the datasets that are not needed"
            )
        self.datasets, self.batch_format = [data for data, _ in datasets], datasets[0][0].batch_format
        weights = [weight for _, weight in datasets]
        # The share of a dataset is its fraction of the positions that the datasets before it leave over. Shares are
        # fixed-point numbers with 32 bits, so that they are exact at any position. Every share is at least 1 / 2**32,
        # and only the share of the last dataset is 1.
        one = 2**32
        self.shares = [min(max(round(one * w / sum(weights[i:])), 1), one - 1) for i, w in enumerate(weights)]
        self.shares[-1] = one
        self.phases = [derive_seed(seed, i) % 2**32 for i in range(len(weights))]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the index of the dataset of a position, and the position within that dataset.

        Of the first p positions that the datasets before it leave over, a dataset with share s has ⌊p·s + phase⌋. The
        others belong to the datasets after it.
        """
        for index, (share, phase) in enumerate(zip(self.shares, self.phases, strict=True)):
            num_before = (position * share + phase) >> 32
            if ((position + 1) * share + phase) >> 32 > num_before:
                return index, num_before
            position -= num_before
        raise AssertionError("unreachable: the last dataset contains every position that the others do not contain")

    def get_rows(self, positions: Sequence[int]) -> list[Row]:
        locations = [self.locate(_check_position(position)) for position in positions]
        rows: dict[tuple[int, int], Row] = {}
        for index, dataset in enumerate(self.datasets):
            own = [location for location in locations if location[0] == index]
            rows.update(zip(own, dataset.get_rows([position for _, position in own]), strict=True))
        return [rows[location] for location in locations]

    def collate(self, rows: Sequence[Row]) -> BatchT:
        return self.datasets[0].collate(rows)


def _check_position(position: int) -> int:
    if position < 0:
        raise InputError(f"position is {position}; positions start at 0, so pass 0 or more")
    return position


def _pad_rows(rows: Sequence[TokenIds], pad_id: int) -> tuple[Tensor, Tensor]:
    """Pad rows on the right. Returns tokens and mask, both with shape (number of rows, length of the longest row)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    tokens = np.full(mask.shape, pad_id, np.int64)
    if len(rows):
        tokens[mask] = np.concatenate(rows)
    return torch.from_numpy(tokens), torch.from_numpy(mask)
