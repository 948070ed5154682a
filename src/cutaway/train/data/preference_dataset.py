"""Datasets of preference learning: pairs of a chosen and a rejected answer, and answers with a label."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from cutaway.train.data.datasets import Row
from cutaway.train.data.records import RecordDataset


class AnswerBatch(NamedTuple):
    """Prompts with their answers, padded on the right."""

    tokens: Int64[Tensor, "R T"]
    is_target: Bool[Tensor, "R T"]
    """Whether each token belongs to the answer."""
    is_token: Bool[Tensor, "R T"]
    """False at padding."""


class PairBatch(NamedTuple):
    """Pairs. The first half of the rows are the chosen answers, the second half are the rejected ones."""

    answers: AnswerBatch

    @property
    def num_pairs(self) -> int:
        return len(self.answers.tokens) // 2


class LabeledBatch(NamedTuple):
    """Answers with a label, and the same prompts with answers to other prompts."""

    answers: AnswerBatch
    is_desirable: Bool[Tensor, " B"]
    mismatched: AnswerBatch


class PairDataset(RecordDataset[PairBatch]):
    """Pairs. A row has tokens and targets of the chosen answer, then those of the rejected answer."""

    def __init__(self, rows: Sequence[Row], seed: int, *, pad_id: int, shuffle: bool = True) -> None:
        super().__init__(rows, seed, shuffle=shuffle)
        self.pad_id, self.batch_format, self.sequences_per_row = pad_id, (type(self), pad_id), 2

    def collate(self, rows: Sequence[Row]) -> PairBatch:
        return PairBatch(pad_answers([*(row[:2] for row in rows), *(row[2:] for row in rows)], self.pad_id))


class LabeledDataset(RecordDataset[LabeledBatch]):
    """Answers with a label. A row has tokens, targets and the label of an answer.

    `get_rows` appends tokens and targets of the same prompt with the answer of the preceding row in the group; the
    first row of a group gets the answer of the last. A group has the rows of a training step.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seed: int,
        *,
        pad_id: int,
        max_tokens: int,
        group_size: int | None,
        shuffle: bool = True,
    ) -> None:
        """`group_size`: number of sequences of a training step. None: all rows are one group."""
        super().__init__(rows, seed, shuffle=shuffle)
        self.pad_id, self.max_tokens = pad_id, max_tokens
        self.group_size = group_size or self.num_sequences
        self.batch_format = type(self), pad_id, max_tokens, self.group_size

    def get_rows(self, positions: Sequence[int]) -> list[Row]:
        rows = super().get_rows(positions)
        others = super().get_rows([self._preceding(position) for position in positions])
        return [(*row, *self._replace_answer(row, other)) for row, other in zip(rows, others, strict=True)]

    def collate(self, rows: Sequence[Row]) -> LabeledBatch:
        is_desirable = torch.tensor([bool(row[2][0]) for row in rows], dtype=torch.bool)
        return LabeledBatch(
            pad_answers([row[:2] for row in rows], self.pad_id),
            is_desirable,
            pad_answers([row[3:] for row in rows], self.pad_id),
        )

    def _preceding(self, position: int) -> int:
        start = position - position % self.group_size
        return start + (position - start - 1) % self.group_size

    def _replace_answer(self, row: Row, other: Row) -> Row:
        """The prompt of a row with the answer of another row, truncated on the right."""
        starts = [int(np.argmax(each[1])) for each in (row, other)]  # the first token of the answer
        tokens = np.concatenate([row[0][: starts[0]], other[0][starts[1] :]])
        is_target = np.concatenate([row[1][: starts[0]], other[1][starts[1] :]])
        return tokens[: self.max_tokens], is_target[: self.max_tokens]


def pad_answers(rows: Sequence[Row], pad_id: int) -> AnswerBatch:
    """Batch of rows with tokens and targets, padded on the right to the longest row."""
    width = max((len(tokens) for tokens, _ in rows), default=2)
    tokens = np.full((len(rows), width), pad_id, np.int64)
    is_target, is_token = np.zeros((2, len(rows), width), bool)
    for index, (row_tokens, row_targets) in enumerate(rows):
        tokens[index, : len(row_tokens)] = row_tokens
        is_target[index, : len(row_tokens)] = row_targets
        is_token[index, : len(row_tokens)] = True
    return AnswerBatch(*(torch.from_numpy(each) for each in (tokens, is_target, is_token)))
