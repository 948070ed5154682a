"""Encoders of the records of task heads: token ids of their texts, and labels."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.evaluate.label_set import LabelError, LabelSet
from cutaway.tokenizer import Tokenizer
from cutaway.tokenizer.text_encoder import EncodedText, TextEncoder, first_tokens
from cutaway.train.data.datasets import Row
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import InvalidRecordError, Record, RecordDataset, RecordSplits
from cutaway.train.data.task_dataset import IGNORE_INDEX, TaskDataset, build_row
from cutaway.train.data.task_records import (
    parse_choice_question,
    parse_labeled_text,
    parse_tagged_text,
    parse_text_pair,
)
from cutaway.train.logging.metrics_log import Metrics

NUM_EXAMPLES = 3
"""Number of training records that are shown with their labels."""


class TaskEncoder(RecordEncoder):
    """Encodes the texts of records with at most `max_len` tokens each. Longer texts are truncated at their end."""

    def __init__(self, tokenizer: Tokenizer, max_len: int, config: Config) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len
        self.text_encoder = TextEncoder(tokenizer, max_len)
        self.has_token_types = any(stack.embedding.token_types > 1 for stack in config.stacks.values())
        self.num_truncated = 0
        """Number of records with a truncated text."""

    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]:
        pad_id = self.tokenizer.pad_token_id or 0
        return TaskDataset(rows, seed, pad_id=pad_id, has_token_types=self.has_token_types, shuffle=shuffle)

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics:
        lengths = [int(row[0].max()) for row in rows]
        log(
            f"data: {len(rows):,} training records, {len(splits.validation):,} validation records; longest text"
            f" {max(lengths):,} tokens, mean {sum(lengths) / len(lengths):,.0f}"
        )
        if self.num_truncated:
            log(f"{self.num_truncated:,} records have more than {self.max_len:,} tokens (data.seq_len): truncated")
        counts = self.count_labels(rows)
        statistics: Metrics = {
            "num_records": len(rows),
            "num_validation_records": len(splits.validation),
            "num_truncated": self.num_truncated,
            "longest_text": max(lengths),
        }
        if counts:
            log(f"labels: {format_counts(counts)}")
            statistics["labels"] = counts
            if missing := [name for name, count in counts.items() if not count]:
                log(f"no training record has the label {', '.join(missing)}, so the model cannot learn it")
        examples = [{"segments": self.show_row(row)} for row in rows[:NUM_EXAMPLES]]
        return {"statistics": statistics, "examples": examples}

    def count_labels(self, rows: Sequence[Row]) -> dict[str, int]:
        """Number of training records, or words, of each label, if there are labels."""
        return {}

    @abstractmethod
    def format_label(self, row: Row) -> str:
        """Label of a row, for the examples."""

    def show_row(self, row: Row) -> list[dict[str, Any]]:
        """Decoded texts of a row, and its label."""
        ends = np.cumsum(row[0])
        texts = [
            self.tokenizer.decode(row[1][end - length : end].tolist(), skip_special_tokens=False)
            for length, end in zip(row[0], ends, strict=True)
        ]
        return [
            {"text": f"{' | '.join(texts)} → ", "target": False},
            {"text": self.format_label(row), "target": True},
        ]

    def encode_texts(self, texts: Sequence[tuple[str, str | None]]) -> list[EncodedText]:
        try:
            encoded = [self.text_encoder.encode(text, pair) for text, pair in texts]
        except InputError as error:
            raise InvalidRecordError("the tokenizer cannot encode it", str(error)) from None
        self.num_truncated += any(each.is_truncated for each in encoded)
        return encoded


class ClassificationEncoder(TaskEncoder):
    """Encodes texts, or pairs of texts, with a label."""

    def __init__(self, tokenizer: Tokenizer, max_len: int, config: Config, labels: LabelSet) -> None:
        super().__init__(tokenizer, max_len, config)
        self.labels = labels

    def encode(self, record: Record) -> Row:
        parsed = parse_labeled_text(record)
        try:
            label = self.labels.encode(parsed.label)
        except LabelError as error:
            raise InvalidRecordError(error.reason, error.detail) from None
        return build_row(self.encode_texts([(parsed.text, parsed.pair)]), label)

    def count_labels(self, rows: Sequence[Row]) -> dict[str, int]:
        return self.labels.count([row[3] for row in rows])

    def format_label(self, row: Row) -> str:
        return self.labels.format(row[3])


class TokenClassificationEncoder(TaskEncoder):
    """Encodes words with their tags. The first token of a word has its tag, other tokens have IGNORE_INDEX."""

    def __init__(self, tokenizer: Tokenizer, max_len: int, config: Config, names: Sequence[str]) -> None:
        super().__init__(tokenizer, max_len, config)
        self.names = tuple(names)
        self.index_of = {name: index for index, name in enumerate(names)}

    def encode(self, record: Record) -> Row:
        parsed = parse_tagged_text(record)
        if unknown := [tag for tag in parsed.tags if tag not in self.index_of]:
            known = ", ".join(self.names[:8])
            raise InvalidRecordError("unknown tag", f"'{unknown[0]}' is not one of the {len(self.names)} tags {known}")
        [text] = self.encode_texts([(parsed.text, None)])
        labels = np.full(len(text.ids), IGNORE_INDEX, np.int64)
        for token, tag in zip(first_tokens(text.offsets, parsed.spans), parsed.tags, strict=True):
            if token is not None:
                labels[token] = self.index_of[tag]
        if (labels == IGNORE_INDEX).all():
            raise InvalidRecordError("no word", "the tokenizer has no tokens for its words")
        return build_row([text], labels)

    def count_labels(self, rows: Sequence[Row]) -> dict[str, int]:
        counts = Counter(int(label) for row in rows for label in row[3])
        return {name: counts.get(index, 0) for index, name in enumerate(self.names)}

    def format_label(self, row: Row) -> str:
        return " ".join(self.names[label] for label in row[3] if label != IGNORE_INDEX)


class MultipleChoiceEncoder(TaskEncoder):
    """Encodes a question with each of its choices, as pairs of texts."""

    def encode(self, record: Record) -> Row:
        parsed = parse_choice_question(record)
        texts = self.encode_texts([(parsed.question, choice) for choice in parsed.choices])
        return build_row(texts, np.array([parsed.answer], np.int64))

    def format_label(self, row: Row) -> str:
        return f"choice {int(row[3][0]) + 1}"


class EmbeddingEncoder(TaskEncoder):
    """Encodes pairs of similar texts, with negatives, or pairs of texts with a score."""

    def __init__(self, tokenizer: Tokenizer, max_len: int, config: Config, *, has_scores: bool) -> None:
        super().__init__(tokenizer, max_len, config)
        self.has_scores = has_scores
        self.num_texts: int | None = None

    def encode(self, record: Record) -> Row:
        parsed = parse_text_pair(record)
        if (parsed.score is not None) != self.has_scores:
            expected = "two texts and a score" if self.has_scores else "an anchor and a positive text"
            raise InvalidRecordError("other form than the first record", f"the first record has {expected}")
        self.num_texts = self.num_texts or len(parsed.texts)
        if len(parsed.texts) != self.num_texts:
            raise InvalidRecordError(
                "other number of negatives",
                f"{len(parsed.texts) - 2}, but the first record has {self.num_texts - 2}",
            )
        texts = self.encode_texts([(text, None) for text in parsed.texts])
        return build_row(texts, np.array([np.nan if parsed.score is None else parsed.score], np.float32))

    def format_label(self, row: Row) -> str:
        if self.has_scores:
            return f"{row[3][0]:g}"
        return "similar" if len(row[0]) == 2 else "the first is more similar to the second than to the others"


def format_counts(counts: dict[str, int], limit: int = 12) -> str:
    """'spam 1,200 (40 %), ham 1,800 (60 %)'."""
    total = max(1, sum(counts.values()))
    shown = [f"{name} {count:,} ({count / total:.0%})" for name, count in list(counts.items())[:limit]]
    return ", ".join([*shown, *([f"and {len(counts) - limit} more"] if len(counts) > limit else [])])
