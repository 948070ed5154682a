"""Encoder of the records of supervised fine-tuning: token ids, and a mask of the tokens that are targets."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.chat.assistant_mask import MaskedTokens
from cutaway.train.data.chat_dataset import PackedChatDataset, PaddedChatDataset
from cutaway.train.data.chat_formats import parse_record
from cutaway.train.data.chat_summary import summarize_rows
from cutaway.train.data.conversation_encoder import ConversationEncoder
from cutaway.train.data.datasets import Row
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import InvalidRecordError, Record, RecordDataset, RecordSplits
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.schema import SFTConfig


class SFTEncoder(RecordEncoder):
    """Encodes conversations, prompts with completions, and texts.

    A row has token ids, and for each token 1 if it is a target. Texts and completions are followed by EOS.
    """

    def __init__(
        self, objective: SFTConfig, max_len: int, tokenizer: Tokenizer, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """`max_len`: maximum number of input tokens. `stop_token_ids`: tokens that end generation, besides EOS."""
        self.objective, self.tokenizer = objective, tokenizer
        self.encoder = ConversationEncoder(tokenizer, max_len, objective.truncation, stop_token_ids)

    def encode(self, record: Record) -> Row:
        masked = self.encoder.encode(parse_record(record))
        if self.objective.train_on == "all":
            masked = MaskedTokens(masked.ids, [True] * len(masked.ids))
        masked = self.encoder.truncate(masked)
        if not any(masked.is_target[1:]):
            raise InvalidRecordError("no target tokens", "no token of the assistant is within data.seq_len tokens")
        return np.array(masked.ids, np.int64), np.array(masked.is_target, np.int64)

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]:
        pad_id = self.tokenizer.pad_token_id or 0
        if not self.objective.packing:
            return PaddedChatDataset(rows, seed, pad_id=pad_id, shuffle=shuffle)
        return PackedChatDataset(rows, seed, max_tokens=self.encoder.max_tokens, pad_id=pad_id, shuffle=shuffle)

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics:
        num_sequences = len(rows)
        if self.objective.packing:
            dataset = self.build_dataset(rows, 0, shuffle=False)
            num_sequences = dataset.num_sequences
        return summarize_rows(rows, splits, self.encoder.summary, self.tokenizer, num_sequences, log)

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.encoder.end_token_ids
