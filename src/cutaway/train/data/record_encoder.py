"""Interface of the encoders that convert records to rows of token ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from cutaway.train.data.datasets import Row
from cutaway.train.data.records import Record, RecordDataset, RecordSplits
from cutaway.train.logging.metrics_log import Metrics


class RecordEncoder(ABC):
    """Converts records to rows of token ids, and builds the dataset of the rows."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn of the assistant in the records, at which generation should stop."""
        return frozenset()

    def expand(self, records: list[Record]) -> list[Record]:
        """Records of a split to encode, if they differ from those of the files."""
        return records

    @abstractmethod
    def encode(self, record: Any) -> Row:
        """Row of a record. Raises InvalidRecordError if the record is left out."""

    @abstractmethod
    def build_dataset(self, rows: Sequence[Row], seed: int, *, shuffle: bool) -> RecordDataset[Any]: ...

    def describe(self, rows: Sequence[Row], splits: RecordSplits, log: Callable[[str], None]) -> Metrics | None:
        """Log statistics of the training rows. Returns statistics and examples for `Callback.on_data`, if any."""
        log(f"data: {len(rows):,} training records, {len(splits.validation):,} validation records")
        return None
