"""Training data of the objectives that train on records (`records.py`): encoders of records and their datasets."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.train.checkpoint.pretrained_checkpoint import BaseCheckpointInfo
from cutaway.train.data.chat_encoder import SFTEncoder
from cutaway.train.data.preference_encoder import LabeledEncoder, PairEncoder
from cutaway.train.data.prompt_encoder import PromptEncoder
from cutaway.train.data.record_encoder import RecordEncoder
from cutaway.train.data.records import RecordDataset, RecordSplits, encode_records, split_records
from cutaway.train.data.task_data import TASK_OBJECTIVES, build_task_encoder
from cutaway.train.logging.metrics_log import Metrics
from cutaway.train.recipe.grpo import GRPOConfig
from cutaway.train.recipe.preference_objectives import DPOConfig, KTOConfig, ORPOConfig
from cutaway.train.recipe.schema import DataConfig, ObjectiveConfig, SFTConfig
from cutaway.train.recipe.task_objectives import RewardConfig, TaskObjectiveConfig

RECORD_OBJECTIVES: frozenset[str] = frozenset({"sft", "dpo", "kto", "orpo", "grpo", *TASK_OBJECTIVES})
"""Kinds of the objectives that train on records instead of documents."""


@dataclass(frozen=True)
class RecordDatasets:
    """Training and validation dataset of records."""

    train: RecordDataset[Any]
    validation: RecordDataset[Any]
    fingerprint: str
    """Hash of records and token ids."""
    summary: Metrics | None
    """Statistics and examples of the training records, for `Callback.on_data`."""
    end_token_ids: frozenset[int]
    """`RecordEncoder.end_token_ids`."""


def uses_records(objective: ObjectiveConfig) -> bool:
    """Whether the objective trains on records instead of documents."""
    return objective.kind in RECORD_OBJECTIVES


def build_record_encoder(
    objective: ObjectiveConfig,
    data: DataConfig,
    tokenizer: Tokenizer,
    base_info: BaseCheckpointInfo,
    config: Config,
    splits: RecordSplits,
    batch_size: int | None = None,
) -> RecordEncoder:
    """Build the encoder of the records of an objective. Sequences are limited to the context of the model.

    `batch_size`: number of sequences of a training step, for objectives whose rows depend on it.
    """
    max_len = data.seq_len if config.context is None else min(data.seq_len, config.context)
    stop_token_ids = base_info.eos_token_ids(tokenizer)
    match objective:
        case SFTConfig():
            return SFTEncoder(objective, max_len, tokenizer, stop_token_ids)
        case RewardConfig():
            return PairEncoder(objective, max_len - 1, tokenizer, stop_token_ids)  # the last token is an input, too
        case DPOConfig() | ORPOConfig():
            return PairEncoder(objective, max_len, tokenizer, stop_token_ids)
        case KTOConfig():
            return LabeledEncoder(objective, max_len, tokenizer, stop_token_ids, batch_size=batch_size)
        case TaskObjectiveConfig():
            return build_task_encoder(objective, tokenizer, max_len, config, [*splits.train, *splits.validation])
        case GRPOConfig():
            return PromptEncoder(objective, max_len, tokenizer, stop_token_ids)
    raise InputError(f"objective {objective.kind} does not train on records")


def load_record_datasets(
    data: DataConfig,
    objective: ObjectiveConfig,
    tokenizer: Tokenizer,
    base_info: BaseCheckpointInfo,
    config: Config,
    seed: int,
    log: Callable[[str], None],
    batch_size: int | None = None,
) -> RecordDatasets:
    """Read, split and encode the records, and build the datasets of both splits."""
    splits = split_records(data.sources, validation_split=data.validation_split, seed=seed)
    encoder = build_record_encoder(objective, data, tokenizer, base_info, config, splits, batch_size)
    train_rows, validation_rows = (
        encode_records(encoder.expand(records), encoder.encode, splits.skipped, log)
        for records in (splits.train, splits.validation)
    )
    if splits.skipped.total:
        log(f"skipped records: {splits.skipped}")
    for name, rows in (("training", train_rows), ("validation", validation_rows)):
        if not rows:
            reason = f" ({splits.skipped})" if splits.skipped.total else ""
            raise InputError(
                f"the {name} split has no valid record{reason}; fix the records, or change data.validation_split or"
                " training.seed"
            )
    summary = encoder.describe(train_rows, splits, log)
    fingerprint = hashlib.sha256(splits.fingerprint.encode())
    for row in (*train_rows, *validation_rows):
        for values in row:
            fingerprint.update(values.tobytes())
    train, validation = (
        encoder.build_dataset(rows, seed, shuffle=shuffle)
        for rows, shuffle in ((train_rows, True), (validation_rows, False))
    )
    return RecordDatasets(train, validation, fingerprint.hexdigest(), summary, encoder.end_token_ids)
