"""Records: rows of JSON Lines, JSON, CSV, TSV and Parquet files, as the data of fine-tuning objectives.

Documents (`documents.py`) are texts that are tokenized into memory-mapped files. Records have several fields, such as
messages or a chosen and a rejected answer. Fine-tuning data is small, so that it is kept in memory.
"""

import csv
import hashlib
import importlib
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cutaway.errors import InputError
from cutaway.train.data.datasets import BatchT, PositionalDataset, Row
from cutaway.train.data.documents import PARQUET_BATCH_ROWS, SkippedDocuments
from cutaway.train.data.shuffle import shuffle_indices
from cutaway.train.data.sources import list_source_files
from cutaway.train.recipe.schema import STDLIB_PATH, SourceConfig

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
LOG_INTERVAL = 5.0
"""Number of seconds between messages about the progress."""
MAX_CELL_CHARS = 1 << 26
"""Maximum length of a cell of a CSV file. The default of the csv module is shorter than some documents."""
EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True)
class Record:
    """A row of a file: its fields by name, and its location, for messages."""

    fields: dict[str, Any]
    location: str
    """'FILE line NUMBER'."""
    source: SourceConfig | None = None
    """Source of the record, which may name its columns."""

    @property
    def digest(self) -> bytes:
        """Hash of the fields."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True, default=str).encode("utf-8", "replace")).digest()


@dataclass(frozen=True)
class RecordSplits:
    """Records of the training and validation splits, and a hash of all records."""

    train: list[Record]
    validation: list[Record]
    fingerprint: str
    skipped: SkippedDocuments


def read_records(source: SourceConfig, skipped: SkippedDocuments) -> Iterator[Record]:
    """Iterate over the records of a source, ordered by file name. Invalid rows are added to `skipped`."""
    if source.path == STDLIB_PATH:
        raise InputError(
            "data.sources[].path is 'python-stdlib', which is plain text, but this objective needs records with several"
            " fields; pass a .jsonl, .json, .csv, .tsv or .parquet file with --data"
        )
    for file in list_source_files(source):
        path = file.path
        if path.suffix not in RECORD_SUFFIXES or not path.is_file():
            skipped.add(f"not a file with records ({', '.join(RECORD_SUFFIXES)})", str(path))
            continue
        try:
            for location, row in _READERS[path.suffix](path, skipped):
                if not isinstance(row, dict):
                    skipped.add("not an object", f"{location} is a {type(row).__name__}")
                elif (problem := _find_surrogate(row)) is not None:
                    skipped.add("invalid UTF-8", f"{location}: unpaired surrogate {problem}")
                else:
                    yield Record(row, location, source)
        except UnicodeDecodeError as error:  # in the middle of a file: the rows after it would be lost
            raise InputError(
                f"'{path}' is not UTF-8 ({error}); convert it, e.g. with: iconv -f latin1 -t utf-8 {path.name}"
            ) from None
        except csv.Error as error:
            raise InputError(f"'{path}' cannot be read to its end: {error}; correct the file") from None
        except (OSError, ValueError) as error:
            skipped.add("unreadable file", f"{path}: {error}")


def _find_surrogate(row: dict[str, Any]) -> str | None:
    """Where a row has an unpaired surrogate (\\ud800 in JSON), which no tokenizer can encode. None if it has none."""
    values: list[object] = [row]
    while values:
        value = values.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                return f"at character {error.start} of {value[max(0, error.start - 20) :][:40]!r}"
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value
    return None


def split_records(sources: Sequence[SourceConfig], *, validation_split: float, seed: int) -> RecordSplits:
    """Read the records of all sources, and divide them into a training and a validation split.

    The split of a record depends only on its contents, so that equal records are in the same split. At least one record
    is in each split. Records with the same value in the source's group_column are in the same split.
    """
    skipped = SkippedDocuments()
    splits: tuple[list[Record], list[Record]] = ([], [])
    keys: list[tuple[int, int, int]] = []
    digest = hashlib.sha256()
    for source in sources:
        for record in read_records(source, skipped):
            digest.update(record.digest)
            group = None if source.group_column is None else record.fields.get(source.group_column)
            key = record.digest if group is None else hashlib.sha256(str(group).encode("utf-8", "replace")).digest()
            draw = int.from_bytes(hashlib.sha256(f"{seed}:".encode() + key).digest()[:8], "big")
            is_validation = draw < int(validation_split * 2**64)
            splits[is_validation].append(record)
            keys.append((draw, int(is_validation), len(splits[is_validation]) - 1))
    train, validation = splits
    if not keys:
        paths = ", ".join(f"'{source.path}'" for source in sources)
        reason = f": {skipped}" if skipped.total else ""
        raise InputError(f"data.sources: {paths} has no records{reason}; pass a file with one JSON object per line")
    if not train or not validation:
        if len({draw for draw, *_ in keys}) < 2:
            raise InputError(
                "the data has fewer than two different records, but training and validation need at least one each; add"
                " records"
            )
        # Move the record that is nearest to the threshold, and those that are equal to it.
        nearest = min(keys)[0] if not validation else max(keys)[0]
        source_split, target = (train, validation) if not validation else (validation, train)
        moved = {index for draw, _, index in keys if draw == nearest}
        target.extend(record for index, record in enumerate(source_split) if index in moved)
        source_split[:] = [record for index, record in enumerate(source_split) if index not in moved]
    return RecordSplits(train, validation, digest.hexdigest(), skipped)


def encode_records(
    records: Sequence[Record],
    encode: Callable[[Record], EncodedT],
    skipped: SkippedDocuments,
    log: Callable[[str], None] = lambda _: None,
) -> list[EncodedT]:
    """Apply `encode` to each record. A record for which it raises `InvalidRecordError` is added to `skipped`.

    The progress is logged every LOG_INTERVAL seconds.
    """
    encoded = []
    last_time = time.monotonic()
    for number, record in enumerate(records):
        if (now := time.monotonic()) - last_time > LOG_INTERVAL:
            log(f"encoding the records: {number:,} of {len(records):,}")
            last_time = now
        try:
            encoded.append(encode(record))
        except InvalidRecordError as error:
            skipped.add(error.reason, f"{record.location}: {error.detail}")
    return encoded


class InvalidRecordError(Exception):
    """A record that is left out: the reason, which is the same for similar records, and the detail of this record."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason} ({detail})")
        self.reason, self.detail = reason, detail


class RecordDataset(PositionalDataset[BatchT]):
    """Dataset of rows in memory. With `shuffle`, every epoch has a new order. Subclasses define `collate`."""

    def __init__(self, rows: Sequence[Row], seed: int, *, shuffle: bool = True) -> None:
        if not rows:
            raise InputError("a split of the data has no valid records; add records, or change data.validation_split")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self.num_sequences, self.num_skipped = len(rows), 0
        self.batch_format = type(self)
        self.max_len = max(len(values) for row in rows for values in row)
        """Largest number of tokens of a sequence."""
        self.sequences_per_row = 1
        """Largest number of sequences of a row."""

    def get_rows(self, positions: Sequence[int]) -> list[Row]:
        checked = np.array(positions, np.int64)
        epochs, indices = checked // self.num_sequences, checked % self.num_sequences
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                in_epoch = epochs == epoch
                indices[in_epoch] = shuffle_indices(indices[in_epoch], self.num_sequences, self.seed, epoch)
        return [self.rows[index] for index in indices.tolist()]

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> BatchT: ...


def _read_json_lines(path: Path, skipped: SkippedDocuments) -> Iterator[tuple[str, object]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            location = f"{path} line {number}"
            try:
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield location, json.loads(text)
            except (ValueError, RecursionError) as error:
                skipped.add("invalid JSON", f"{location}: {error}")


def _read_json(path: Path, skipped: SkippedDocuments) -> Iterator[tuple[str, object]]:
    """A JSON file contains a list of objects."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        skipped.add("invalid JSON", f"{path}: {error}")
        return
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        yield f"{path} item {number}", row


def _read_csv(path: Path, skipped: SkippedDocuments) -> Iterator[tuple[str, object]]:
    """The first line of a CSV or TSV file is the header."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        reader = csv.DictReader(stream, **options)
        while True:
            limit = csv.field_size_limit(MAX_CELL_CHARS)
            try:
                row = next(reader, None)
            finally:
                csv.field_size_limit(limit)
            if row is None:
                return
            location = f"{path} line {reader.line_num}"
            if None in row or None in row.values():
                skipped.add("number of cells differs from the header", location)
            else:
                yield location, row


def _read_parquet(path: Path, skipped: SkippedDocuments) -> Iterator[tuple[str, object]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"'{path}' needs pyarrow; pip install pyarrow, or convert the file to JSON Lines") from None
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=PARQUET_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"{path} row {number}", row


_READERS: dict[str, Callable[[Path, SkippedDocuments], Iterator[tuple[str, object]]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
