"""Datasets of supervised fine-tuning: tokens and target masks of conversations, packed or padded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from cutaway.train.data.datasets import Row
from cutaway.train.data.packing import pack_best_fit
from cutaway.train.data.records import RecordDataset


class SFTBatch(NamedTuple):
    """Tokens of conversations, padded on the right, and whether each token is a target."""

    tokens: Int64[Tensor, "B T"]
    is_target: Bool[Tensor, "B T"]
    document_ids: Int64[Tensor, "B T"] | None
    """Index of each token's conversation in the sequence. None if each row is one conversation."""


class PaddedChatDataset(RecordDataset[SFTBatch]):
    """Conversations, one per row. A row has tokens and targets. Batches are padded to their longest row."""

    def __init__(self, rows: Sequence[Row], seed: int, *, pad_id: int, shuffle: bool = True) -> None:
        super().__init__(rows, seed, shuffle=shuffle)
        self.pad_id, self.batch_format = pad_id, (type(self), pad_id)

    def collate(self, rows: Sequence[Row]) -> SFTBatch:
        width = max((len(tokens) for tokens, *_ in rows), default=2)
        tokens = _pad([row[0] for row in rows], width, self.pad_id)
        return SFTBatch(tokens, _pad([row[1] for row in rows], width, 0).bool(), None)


class PackedChatDataset(RecordDataset[SFTBatch]):
    """Sequences of several conversations each. All batches have the width of the longest sequence.

    A row has tokens, targets and document ids. The first token of a conversation is not predicted.
    """

    def __init__(self, rows: Sequence[Row], seed: int, *, max_tokens: int, pad_id: int, shuffle: bool = True) -> None:
        packs = pack_best_fit([len(tokens) for tokens, *_ in rows], max_tokens)
        packed = [_concatenate([rows[index] for index in pack]) for pack in packs]
        super().__init__(packed, seed, shuffle=shuffle)
        self.width = max((len(tokens) for tokens, *_ in packed), default=2)
        self.pad_id, self.batch_format = pad_id, (type(self), self.width, pad_id)

    def collate(self, rows: Sequence[Row]) -> SFTBatch:
        tokens = _pad([row[0] for row in rows], self.width, self.pad_id)
        is_target = _pad([row[1] for row in rows], self.width, 0).bool()
        # Padding belongs to the last conversation: it has no targets, and no earlier token attends to it.
        last = [np.pad(row[2], (0, self.width - len(row[2])), mode="edge") for row in rows]
        return SFTBatch(tokens, is_target, torch.from_numpy(np.array(last, np.int64).reshape(-1, self.width)))


def _concatenate(rows: Sequence[Row]) -> Row:
    """Tokens, targets and document ids of the sequence that consists of these rows."""
    tokens, is_target = (np.concatenate([row[i] for row in rows]) for i in (0, 1))
    return tokens, is_target, np.repeat(np.arange(len(rows), dtype=np.int64), [len(row[0]) for row in rows])


def _pad(rows: Sequence[Any], width: int, value: int) -> Tensor:
    padded = np.full((len(rows), width), value, np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
