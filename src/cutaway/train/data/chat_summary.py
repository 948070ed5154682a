"""Statistics and examples of the data of supervised fine-tuning, which are shown before training."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.tokenizer import Tokenizer
from cutaway.train.data.datasets import Row
from cutaway.train.data.records import RecordSplits
from cutaway.train.logging.metrics_log import Metrics

NUM_EXAMPLES = 3
"""Number of training records that are shown with their targets."""


@dataclass
class ChatSummary:
    """Counts over all records, of the training and the validation split."""

    truncation: str
    max_tokens: int
    num_conversations: int = 0
    """Number of records that were rendered with the chat template."""
    longest: int = 0
    """Number of tokens of the longest record, before truncation."""
    num_too_long: int = 0
    """Number of records with more than `max_tokens` tokens."""
    default_template: str | None = None
    """Name of the shipped chat template that is used, because the tokenizer has none."""


def summarize_rows(
    rows: Sequence[Row],
    splits: RecordSplits,
    summary: ChatSummary,
    tokenizer: Tokenizer,
    num_sequences: int,
    log: Callable[[str], None],
) -> Metrics:
    """Log statistics of the training rows. Returns them with the first examples, as a row for `on_data`."""
    num_tokens, num_targets = (sum(int(count(row)) for row in rows) for count in (_num_tokens, _num_targets))
    statistics = {
        "num_records": len(rows),
        "num_validation_records": len(splits.validation),
        "num_tokens": num_tokens,
        "num_target_tokens": num_targets,
        "longest_record": summary.longest,
        "num_too_long": summary.num_too_long,
        "num_sequences": num_sequences,
    }
    log_default_template(summary, log)
    log(
        f"data: {len(rows):,} training records, {num_tokens:,} tokens, of which {num_targets:,}"
        f" ({num_targets / num_tokens:.0%}) are targets; {num_sequences:,} sequences per epoch; longest record"
        f" {summary.longest:,} tokens"
    )
    log_truncation(summary, log, what="records")
    examples = [{"segments": target_segments(row, tokenizer)} for row in rows[:NUM_EXAMPLES]]
    return {"statistics": statistics, "examples": examples}


def log_default_template(summary: ChatSummary, log: Callable[[str], None]) -> None:
    """Log which shipped chat template is used, if the tokenizer has none."""
    if summary.default_template is not None:
        log(
            f"the model has no chat template; using '{summary.default_template}', which is saved with the model"
            " (data.chat_template)"
        )


def log_truncation(summary: ChatSummary, log: Callable[[str], None], *, what: str) -> None:
    """Log how many records are too long, and what is done with them. `what`: 'records', or parts of records."""
    if summary.num_too_long:
        action = "left out" if summary.truncation == "drop" else "truncated on the right"
        log(
            f"{summary.num_too_long:,} {what} have more than data.seq_len + 1 = {summary.max_tokens:,} tokens: {action}"
        )


def target_segments(row: Row, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Decoded text of a row, as segments of adjacent tokens that are all targets or all not targets."""
    tokens, is_target = row[0], row[1].astype(bool)
    borders = [0, *(np.flatnonzero(np.diff(row[1])) + 1).tolist(), len(tokens)]
    return [
        {
            "text": tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False),
            "target": bool(is_target[start]),
        }
        for start, end in itertools.pairwise(borders)
    ]


def _num_tokens(row: Row) -> int:
    return len(row[0])


def _num_targets(row: Row) -> int:
    """Number of predicted targets. The first token is never predicted."""
    return int(row[1][1:].sum())
