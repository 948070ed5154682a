"""Documents, one after another, from text files, JSON lines, TSV and parquet. Bad ones are counted and passed over."""

import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cutaway.errors import InputError
from cutaway.train.data.sources import SourceFile, TextSource, list_source_files

__all__ = ["Document", "SkippedDocuments", "TextSource", "read_documents", "read_file", "read_jsonl", "read_text"]

MAX_DOCUMENT_CHARS = 1 << 21
"""Characters of a document from a text file; a longer file is cut at line ends, so that none has to be held whole."""
PARQUET_BATCH_ROWS = 256
"""Rows of parquet that are held at a time."""


class Document(NamedTuple):
    text: str
    target: str | None = None
    split_group: str | None = None
    """Documents of one group fall to one side of the split."""


@dataclass
class SkippedDocuments:
    """What was passed over: how often each kind, and one example of it."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, example[:300])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(f"{count:,} × {kind} ({self.examples[kind]})" for kind, count in self.counts.items())


def read_documents(source: TextSource, skipped: SkippedDocuments | None = None) -> Iterator[Document]:
    """All documents of a source, in the order of its files' names."""
    skipped = SkippedDocuments() if skipped is None else skipped
    for file in list_source_files(source):
        yield from read_file(file, source, skipped)


def read_file(
    file: SourceFile, source: TextSource, skipped: SkippedDocuments, max_chars: int | None = None
) -> Iterator[Document]:
    """The documents of one file. What cannot be opened or read is a trouble like a bad row.

    A text of more than `max_chars` characters is cut into several.
    """
    path = file.path
    if not path.is_file():  # a pipe or a device may never end
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
                    yield from read_tsv(str(path), stream, source, skipped)
                else:
                    yield from read_text(str(path), stream, skipped, max_chars or MAX_DOCUMENT_CHARS)
    except OSError as error:
        skipped.add("unreadable file", f"{path}: {error.strerror or error}")


def read_text(name: str, stream: BinaryIO, skipped: SkippedDocuments, max_chars: int) -> Iterator[Document]:
    """Line ends stay as they are; a byte-order mark is no text."""
    letters = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rest, ended, empty = "", False, True
    try:
        while not ended:
            more = letters.read(max_chars)
            ended, found = len(more) < max_chars, rest + more
            cut = len(found) if ended else found.rfind("\n") + 1 or len(found)
            found, rest = found[:cut], found[cut:]
            if found.strip():
                empty = False
                yield Document(found)
        if empty:
            skipped.add("empty", name)
    except UnicodeDecodeError as error:
        skipped.add("invalid UTF-8", f"{name}: {error.reason}; not read from there on")
    finally:
        letters.detach()  # whoever opened the stream closes it


def read_jsonl(name: str, stream: BinaryIO, source: TextSource, skipped: SkippedDocuments) -> Iterator[Document]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            skipped.add("invalid UTF-8", f"{where}: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:
            skipped.add("invalid JSON", f"{where}: {error}")
        else:
            yield from _parse_row(row, source, where, skipped)


def read_tsv(name: str, stream: BinaryIO, source: TextSource, skipped: SkippedDocuments) -> Iterator[Document]:
    """Columns between tabs. The first line names them if it has the wanted ones; else they come in the wanted order."""
    names = list(dict.fromkeys(source.columns))
    for number, line in enumerate(stream, 1):
        try:
            cells = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            skipped.add("invalid UTF-8", f"{name} line {number}: {error.reason} at byte {error.start}")
            continue
        if number == 1 and set(names) <= set(cells):
            names = cells
        elif line.strip():
            yield from _parse_row(dict(zip(names, cells, strict=False)), source, f"{name} line {number}", skipped)


def _read_parquet(path: Path, source: TextSource, skipped: SkippedDocuments) -> Iterator[Document]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise InputError(
            f"'{path}' is parquet, which needs pyarrow to be read; pip install pyarrow, or give JSON lines"
        ) from None
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
    except ValueError as error:  # what pyarrow calls ArrowInvalid
        skipped.add("invalid parquet", f"{path} after row {number}: {error}")


def _parse_row(row: object, source: TextSource, location: str, skipped: SkippedDocuments) -> Iterator[Document]:
    if not isinstance(row, dict):
        skipped.add("missing column", f"{location} is no object")
        return
    texts = {}
    for column in source.columns:
        text = row.get(column)
        if not isinstance(text, str):
            why = f"{type(text).__name__}, not text" if column in row else "missing"
            skipped.add("missing column", f"{location}: {column!r} is {why}")
            return
        if not text.strip():
            skipped.add("empty", f"{location}: {column!r}")
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            skipped.add("invalid UTF-8", f"{location}: half a surrogate pair at character {error.start}")
            return
        texts[column] = text
    target = None if source.target_column is None else texts[source.target_column]
    yield Document(
        texts[source.text_column], target, None if source.group_column is None else texts[source.group_column]
    )
