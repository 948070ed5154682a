"""Read documents from text files, JSON Lines, TSV and Parquet. Invalid documents are counted and skipped."""

import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cutaway.errors import InputError
from cutaway.train.data.sources import SourceFile, list_source_files
from cutaway.train.recipe.schema import SourceConfig

MAX_DOCUMENT_CHARS = 1 << 21
"""Maximum number of characters that are read from a text file at a time. Longer files are split at line ends into
several documents."""
PARQUET_BATCH_ROWS = 256
"""Number of Parquet rows read at a time."""


class Document(NamedTuple):
    text: str
    target: str | None = None
    split_group: str | None = None
    """Documents with the same group are in the same split, training or validation."""


@dataclass
class SkippedDocuments:
    """Number of skipped documents by reason, and one example per reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example[:300])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        return "; ".join(f"{count:,} × {reason} ({self.examples[reason]})" for reason, count in self.counts.items())


def read_documents(source: SourceConfig, skipped: SkippedDocuments | None = None) -> Iterator[Document]:
    """Iterate over all documents of a source, ordered by file name. Invalid documents are added to `skipped`."""
    skipped = SkippedDocuments() if skipped is None else skipped
    for file in list_source_files(source):
        yield from read_file(file, source, skipped)


def read_file(
    file: SourceFile, source: SourceConfig, skipped: SkippedDocuments, max_chars: int | None = None
) -> Iterator[Document]:
    """Iterate over the documents of a file. A file that cannot be read is added to `skipped`.

    A text file longer than `max_chars` characters is split into several documents.
    """
    path = file.path
    if not path.is_file():  # reading a pipe or a device may never end
        skipped.add("unreadable file", str(path))
        return
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path, source, skipped)
        elif path.suffix not in (".jsonl", ".tsv") and source.target_column is not None:
            skipped.add("text file without target column", str(path))
        else:
            with path.open("rb") as stream:
                if path.suffix == ".jsonl":
                    yield from read_jsonl(str(path), stream, source, skipped)
                elif path.suffix == ".tsv" and source.target_column is not None:
                    yield from _read_tsv(str(path), stream, source, skipped)
                else:
                    yield from read_text(str(path), stream, skipped, max_chars or MAX_DOCUMENT_CHARS)
    except OSError as error:
        skipped.add("unreadable file", f"{path}: {error.strerror or error}")


def read_text(name: str, stream: BinaryIO, skipped: SkippedDocuments, max_chars: int) -> Iterator[Document]:
    """Iterate over the documents of a text file, which is split at line ends about every `max_chars` characters.

    Line endings are kept, and a byte order mark is removed.
    """
    reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rest, at_end, is_empty = "", False, True
    try:
        while not at_end:
            chars = reader.read(max_chars)
            at_end, text = len(chars) < max_chars, rest + chars
            cut = len(text) if at_end else text.rfind("\n") + 1 or len(text)
            text, rest = text[:cut], text[cut:]
            if text.strip():
                is_empty = False
                yield Document(text)
        if is_empty:
            skipped.add("empty", name)
    except UnicodeDecodeError as error:
        skipped.add("invalid UTF-8", f"{name}: {error.reason}; the rest of the file is skipped")
    finally:
        reader.detach()  # the caller closes the stream


def read_jsonl(name: str, stream: BinaryIO, source: SourceConfig, skipped: SkippedDocuments) -> Iterator[Document]:
    """Iterate over the documents of a JSON Lines file. Invalid lines are added to `skipped`."""
    for location, line in _iter_lines(name, stream, skipped):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            skipped.add("invalid JSON", f"{location}: {error}")
        else:
            yield from _parse_row(row, source, location, skipped)


def _iter_lines(name: str, stream: BinaryIO, skipped: SkippedDocuments) -> Iterator[tuple[str, str]]:
    """Iterate over ('NAME line NUMBER', text) of the lines that are not blank. Invalid UTF-8 is added to `skipped`."""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        location = f"{name} line {number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            skipped.add("invalid UTF-8", f"{location}: {error.reason} at byte {error.start}")
        else:
            yield location, text


def _read_tsv(name: str, stream: BinaryIO, source: SourceConfig, skipped: SkippedDocuments) -> Iterator[Document]:
    """Iterate over the documents of a TSV file.

    The first line is a header if it contains the names of all columns of the source. Without a header, the columns must
    be in the order text, target, group.
    """
    names = list(dict.fromkeys(source.columns))
    first_line = f"{name} line 1"
    for location, line in _iter_lines(name, stream, skipped):
        cells = line.rstrip("\r\n").split("\t")
        if location == first_line and set(names) <= set(cells):
            names = cells
        else:
            yield from _parse_row(dict(zip(names, cells, strict=False)), source, location, skipped)


def _read_parquet(path: Path, source: SourceConfig, skipped: SkippedDocuments) -> Iterator[Document]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(f"'{path}' needs pyarrow; pip install pyarrow, or convert the file to JSON Lines") from None
    columns = list(dict.fromkeys(source.columns))
    number = 0
    try:
        table = parquet.ParquetFile(path)
        if missing := set(columns) - set(table.schema_arrow.names):
            skipped.add("missing column", f"{path} has no column {', '.join(sorted(missing))}")
            return
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield from _parse_row(row, source, f"{path} row {number}", skipped)
    except ValueError as error:  # base class of pyarrow.ArrowInvalid
        skipped.add("invalid Parquet", f"{path} after row {number}: {error}")


def _parse_row(row: object, source: SourceConfig, location: str, skipped: SkippedDocuments) -> Iterator[Document]:
    if not isinstance(row, dict):
        skipped.add("missing column", f"{location} is not an object")
        return
    texts = {}
    for column in source.columns:
        text = row.get(column)
        if not isinstance(text, str):
            problem = f"{type(text).__name__}, not a string" if column in row else "missing"
            skipped.add("missing column", f"{location}: {column!r} is {problem}")
            return
        if not text.strip():
            skipped.add("empty", f"{location}: {column!r}")
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            skipped.add("invalid UTF-8", f"{location}: unpaired surrogate at character {error.start}")
            return
        texts[column] = text
    target = None if source.target_column is None else texts[source.target_column]
    yield Document(
        texts[source.text_column], target, None if source.group_column is None else texts[source.group_column]
    )
