"""Metrics of a reward model on pairs of answers, and the rewards of single answers, for `cutaway eval --data`."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported when it is needed
    from cutaway.config.head import OutputHead
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.train.data.conversation_encoder import ConversationEncoder
    from cutaway.train.data.documents import SkippedDocuments
    from cutaway.train.data.preference_formats import Answer
    from cutaway.train.data.records import Record

REWARD_FORMS = (
    "prompt, chosen and rejected, or answers to score: prompt and completion, messages, or another form of objective"
    " sft"
)


def has_reward(head: "OutputHead") -> bool:
    """Whether a head computes one number per sequence, as that of a reward model."""
    from cutaway.config.head import SequenceClassificationHead

    return isinstance(head, SequenceClassificationHead) and head.num_labels == 1


def are_reward_data(records: Sequence["Record"]) -> bool:
    """Whether records are pairs of answers, or answers without labels."""
    from cutaway.train.data.chat_formats import parse_record
    from cutaway.train.data.documents import SkippedDocuments
    from cutaway.train.data.task_data import parse_valid
    from cutaway.train.data.task_records import parse_labeled_text

    if not records or (records[0].source is not None and records[0].source.target_column is not None):
        return False  # the user has named the column of the label
    if _is_pair(records[0]):
        return True
    labeled, answers = (parse_valid(records, parse, SkippedDocuments()) for parse in (parse_labeled_text, parse_record))
    return next(labeled, None) is None and next(answers, None) is not None


def evaluate_rewards(
    checkpoint: "Checkpoint",
    records: Sequence["Record"],
    skipped: "SkippedDocuments",
    batch_size: int | None,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any] | None:
    """Metrics of pairs of answers, or the mean reward of answers, with the rewards of each record.

    The first record determines the form. None if no record is valid.
    """
    from cutaway.evaluate.confidence_interval import mean_confidence_interval
    from cutaway.evaluate.task_evaluation import compute_rewards
    from cutaway.evaluate.task_heads import preference_metrics
    from cutaway.generate.classify import require_head
    from cutaway.generate.generation_config import unpack_checkpoint
    from cutaway.generate.text_batches import max_text_len
    from cutaway.train.data.chat_formats import parse_record
    from cutaway.train.data.conversation_encoder import ConversationEncoder
    from cutaway.train.data.preference_formats import parse_pair
    from cutaway.train.data.task_data import parse_valid

    model, tokenizer = require_head(checkpoint, "evaluate")
    stop_token_ids = unpack_checkpoint(checkpoint)[2].eos_token_ids
    # The last token is an input, too
    encoder = ConversationEncoder(tokenizer, max_text_len(model.config, tokenizer) - 1, "right", stop_token_ids)
    are_pairs = _is_pair(records[0])

    def encode(record: "Record") -> list[list[int]]:
        if not are_pairs:
            return [_encode(parse_record(record), encoder)]
        pair = parse_pair(record)
        return [_encode(answer, encoder) for answer in (pair.chosen, pair.rejected)]

    encoded = list(parse_valid(records, encode, skipped))
    if (template := encoder.summary.default_template) is not None:
        sys.stderr.write(f"the model has no chat template; messages are rendered with '{template}'\n")
    if not encoded:
        return None
    sequences = [ids for _, answers in encoded for ids in answers]
    scores = compute_rewards(checkpoint, sequences, batch_size=batch_size, progress=progress)
    rewards = scores.view(len(encoded), -1)  # (N, 2) for pairs, otherwise (N, 1)
    names = ("chosen", "rejected") if are_pairs else ("reward",)
    rows = [
        {"location": record.location, **dict(zip(names, row, strict=True))}
        for (record, _), row in zip(encoded, rewards.tolist(), strict=True)
    ]
    if are_pairs:
        metrics = preference_metrics(rewards)
    else:
        mean = mean_confidence_interval(rewards[:, 0].tolist())
        width = mean.half_width
        interval = {} if width is None else {"mean_reward_interval": [mean.mean - width, mean.mean + width]}
        metrics = {"mean_reward": mean.mean, **interval, "num_examples": mean.count}
    return metrics | {"num_truncated": encoder.summary.num_too_long, "records": rows}


def _is_pair(record: "Record") -> bool:
    return {"chosen", "rejected"} <= record.fields.keys()


def _encode(answer: "Answer", encoder: "ConversationEncoder") -> list[int]:
    return encoder.truncate(encoder.encode(answer)).ids
