"""Encoders of preference data: pairs of answers for DPO and ORPO, answers with a label for KTO."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cutaway.tokenizer import Tokenizer
from cutaway.train.data.chat_summary import NUM_EXAMPLES, log_default_template, log_truncation, target_segments
from cutaway.train.data.conversation_encoder import ConversationEncoder
from cutaway.train.data.datasets import Row
from cutaway.train.data.preference_dataset import LabeledDataset, PairDataset
from cutaway.train.data.preference_formats import Answer, parse_labeled, parse_pair, split_pairs
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import InvalidRecordError, Record, RecordDataset, RecordSplits
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.preference_objectives import PreferenceConfig
from cutaway.train.recipe.task_objectives import RewardConfig


class PairEncoder(RecordEncoder):
    """Encodes a chosen and a rejected answer. A row has tokens and targets of the chosen, then of the rejected one."""

    def __init__(
        self,
        objective: PreferenceConfig | RewardConfig,
        max_len: int,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`max_len`: maximum number of input tokens. `stop_token_ids`: tokens that end generation, besides EOS."""
        self.encoder = ConversationEncoder(tokenizer, max_len, objective.truncation, stop_token_ids)
        self.tokenizer = tokenizer
        self.num_texts = 0
        """Number of records that are not rendered with the chat template."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self.encoder.end_token_ids

    def encode(self, record: Record) -> Row:
        pair = parse_pair(record)
        chosen, rejected = (self._encode_answer(answer) for answer in (pair.chosen, pair.rejected))
        if np.array_equal(chosen[0], rejected[0]):
            raise InvalidRecordError("chosen and rejected are equal", "they differ only after data.seq_len tokens")
        return *chosen, *rejected

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]:
        return PairDataset(rows, seed, pad_id=self.tokenizer.pad_token_id or 0, shuffle=shuffle)

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics:
        statistics = self._count(rows, splits) | {
            "num_tokens": sum(len(row[0]) + len(row[2]) for row in rows),
            "num_chosen_tokens": sum(int(row[1].sum()) for row in rows),
            "num_rejected_tokens": sum(int(row[3].sum()) for row in rows),
        }
        chosen, rejected = (statistics[f"num_{name}_tokens"] / len(rows) for name in ("chosen", "rejected"))
        log_default_template(self.encoder.summary, log)
        log(
            f"data: {len(rows):,} training pairs, {statistics['num_tokens']:,} tokens with prompts; answers have"
            f" {chosen:,.0f} (chosen) and {rejected:,.0f} (rejected) tokens on average; longest answer with its prompt"
            f" {self.encoder.summary.longest:,} tokens"
        )
        self._log_hints(log)
        examples = [
            {"chosen": target_segments(row[:2], self.tokenizer), "rejected": target_segments(row[2:], self.tokenizer)}
            for row in rows[:NUM_EXAMPLES]
        ]
        return {"statistics": statistics, "examples": examples}

    def _encode_answer(self, answer: Answer) -> Row:
        num_conversations = self.encoder.summary.num_conversations
        masked = self.encoder.truncate(self.encoder.encode(answer))
        self.num_texts += self.encoder.summary.num_conversations == num_conversations
        if not any(masked.is_target[1:]):
            raise InvalidRecordError("no target tokens", "no token of the answer is within data.seq_len tokens")
        return np.array(masked.ids, np.int64), np.array(masked.is_target, np.int64)

    def _count(self, rows: Sequence[Row], splits: RecordSplits) -> Metrics:
        return {
            "num_records": len(rows),
            "num_validation_records": len(splits.validation),
            "longest_record": self.encoder.summary.longest,
            "num_too_long": self.encoder.summary.num_too_long,
        }

    def _log_hints(self, log: Callable[[str], None]) -> None:
        log_truncation(self.encoder.summary, log, what="answers with their prompt")
        if self.num_texts and self.tokenizer.chat_template is not None:
            log(
                f"{self.num_texts:,} answers are texts, which are not rendered with the chat template of the model; to"
                " train a chat model, write prompt and answers as lists of messages"
            )


class LabeledEncoder(PairEncoder):
    """Encodes answers with a label. A row has tokens, targets and the label: 1 for a desirable answer, otherwise 0."""

    def __init__(
        self,
        objective: PreferenceConfig,
        max_len: int,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int] = (),
        *,
        batch_size: int | None = None,
    ) -> None:
        """`batch_size`: number of sequences of a training step."""
        super().__init__(objective, max_len, tokenizer, stop_token_ids)
        self.batch_size = batch_size

    def expand(self, records: list[Record]) -> list[Record]:
        return split_pairs(records)

    def encode(self, record: Record) -> Row:
        labeled = parse_labeled(record)
        return *self._encode_answer(labeled.answer), np.array([labeled.is_desirable], np.int64)

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]:
        return LabeledDataset(
            rows,
            seed,
            pad_id=self.tokenizer.pad_token_id or 0,
            max_tokens=self.encoder.max_tokens,
            group_size=self.batch_size if shuffle else None,
            shuffle=shuffle,
        )

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics:
        num_desirable = sum(int(row[2][0]) for row in rows)
        statistics = self._count(rows, splits) | {
            "num_tokens": sum(len(row[0]) for row in rows),
            "num_desirable": num_desirable,
            "num_undesirable": len(rows) - num_desirable,
        }
        log_default_template(self.encoder.summary, log)
        log(
            f"data: {len(rows):,} training answers, {num_desirable:,} desirable and {len(rows) - num_desirable:,}"
            f" undesirable; {statistics['num_tokens']:,} tokens with prompts; longest answer with its prompt"
            f" {self.encoder.summary.longest:,} tokens"
        )
        self._log_hints(log)
        examples = [
            {"desirable" if row[2][0] else "undesirable": target_segments(row[:2], self.tokenizer)}
            for row in rows[:NUM_EXAMPLES]
        ]
        return {"statistics": statistics, "examples": examples}
