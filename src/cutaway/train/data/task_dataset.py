"""Dataset of the objectives that train task heads: encoded texts with their labels."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from cutaway.tokenizer.text_encoder import EncodedText
from cutaway.train.data.datasets import Row
from cutaway.train.data.records import RecordDataset

IGNORE_INDEX = -100
"""Label of a token without a tag, as in transformers."""


class TaskBatch(NamedTuple):
    """Texts of a batch of records, padded on the right, and their labels. A record has S texts."""

    tokens: Int64[Tensor, "B S T"]
    mask: Bool[Tensor, "B S T"]
    """False at padding. A text that a record does not have is one padding token that is not masked."""
    token_types: Int64[Tensor, "B S T"] | None
    num_texts: Int64[Tensor, " B"]
    """Number of texts of each record, up to S."""
    labels: Tensor
    """(B, L): one class index, one value per label, or one value per token."""


def build_row(texts: Sequence[EncodedText], label: Any) -> Row:
    """Row of a record: lengths of its texts, their token ids, their token types, and the label."""
    lengths = np.array([len(text.ids) for text in texts], np.int64)
    ids = np.array([token for text in texts for token in text.ids], np.int64)
    types = np.array([type_id for text in texts for type_id in text.type_ids], np.int64)
    return lengths, ids, types, label


class TaskDataset(RecordDataset[TaskBatch]):
    """Records of a task head. Batches are padded to their longest text, and labels with IGNORE_INDEX."""

    def __init__(
        self, rows: Sequence[Row], seed: int, *, pad_id: int, has_token_types: bool, shuffle: bool = True
    ) -> None:
        super().__init__(rows, seed, shuffle=shuffle)
        self.pad_id, self.has_token_types = pad_id, has_token_types
        self.batch_format = (type(self), pad_id, has_token_types)
        self.max_len, self.sequences_per_row = (int(max(each(row[0]) for row in rows)) for each in (max, len))

    def collate(self, rows: Sequence[Row]) -> TaskBatch:
        num_texts = np.array([len(row[0]) for row in rows], np.int64)
        shape = len(rows), int(max(num_texts, default=1)), int(max((max(row[0]) for row in rows), default=1))
        tokens, types = np.full(shape, self.pad_id, np.int64), np.zeros(shape, np.int64)
        mask = np.zeros(shape, bool)
        num_labels = max((len(row[3]) for row in rows), default=1)
        labels = np.full((len(rows), num_labels), IGNORE_INDEX, rows[0][3].dtype if rows else np.int64)
        for index, (lengths, ids, type_ids, label) in enumerate(rows):
            ends = np.cumsum(lengths)
            for text, (start, end) in enumerate(zip(ends - lengths, ends, strict=True)):
                tokens[index, text, : end - start], types[index, text, : end - start] = (
                    ids[start:end],
                    type_ids[start:end],
                )
                mask[index, text, : end - start] = True
            mask[index, len(lengths) :, 0] = True  # attention needs a token
            labels[index, : len(label)] = label
        token_types = torch.from_numpy(types) if self.has_token_types else None
        return TaskBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(mask),
            token_types,
            torch.from_numpy(num_texts),
            torch.from_numpy(labels),
        )
