"""Training data of the objectives that train on records (`records.py`): encoders of records and their datasets."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.train.data.datasets import Row
from cutaway.train.data.records import RecordDataset, RecordSplits, encode_records, split_records
from cutaway.train.recipe.schema import DataConfig, ObjectiveConfig

RECORD_OBJECTIVES: frozenset[str] = frozenset()
"""Kinds of the objectives that train on records instead of documents."""


class RecordEncoder(ABC):
    """Converts records to rows of token ids, and builds the dataset of the rows."""

    @abstractmethod
    def encode(self, record: Any) -> Row:
        """Row of a record. Raises InvalidRecordError if the record is left out."""

    @abstractmethod
    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]: ...

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> None:
        """Log statistics and examples of the training rows."""
        log(f"data: {len(rows):,} training records, {len(splits.validation):,} validation records")


def uses_records(objective: ObjectiveConfig) -> bool:
    """Whether the objective trains on records instead of documents."""
    return objective.kind in RECORD_OBJECTIVES


def build_record_encoder(
    objective: ObjectiveConfig, data: DataConfig, tokenizer: Tokenizer, config: Config
) -> RecordEncoder:
    """Build the encoder of the records of an objective."""
    raise InputError(f"objective {objective.kind} does not train on records")


def load_record_datasets(
    data: DataConfig,
    objective: ObjectiveConfig,
    tokenizer: Tokenizer,
    config: Config,
    seed: int,
    log: Callable[[str], None],
) -> tuple[RecordDataset[Any], RecordDataset[Any], str]:
    """Read, split and encode the records. Returns training dataset, validation dataset and fingerprint of the data."""
    splits = split_records(data.sources, validation_split=data.validation_split, seed=seed)
    encoder = build_record_encoder(objective, data, tokenizer, config)
    train_rows, validation_rows = (
        encode_records(records, encoder.encode, splits.skipped) for records in (splits.train, splits.validation)
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
    encoder.describe(train_rows, splits, log)
    fingerprint = hashlib.sha256(splits.fingerprint.encode())
    for row in (*train_rows, *validation_rows):
        for values in row:
            fingerprint.update(values.tobytes())
    datasets = (
        encoder.build_dataset(rows, seed, shuffle=shuffle)
        for rows, shuffle in ((train_rows, True), (validation_rows, False))
    )
    train, validation = datasets
    return train, validation, fingerprint.hexdigest()
