"""Documents, one after another, from text files, JSON lines, TSV and parquet. Bad ones are counted and passed over."""

import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from cutaway.errors import InputError
from cutaway.train.data.sources import File, Source, files

__all__ = ["Document", "Source", "Troubles", "json_lines", "read", "read_file", "text"]

LONGEST = 1 << 21
"""Characters of a document from a text file; a longer file is cut at line ends, so that none has to be held whole."""
ROWS = 256
"""Rows of parquet that are held at a time."""


class Document(NamedTuple):
    text: str
    target: str | None = None
    group: str | None = None
    """Documents of one group fall to one side of the split."""


@dataclass
class Troubles:
    """What was passed over: how often each kind, and one example of it."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, example: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.examples.setdefault(kind, example[:300])

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return "; ".join(f"{count:,} × {kind} ({self.examples[kind]})" for kind, count in self.counts.items())


def read(source: Source, troubles: Troubles | None = None) -> Iterator[Document]:
    """All documents of a source, in the order of its files' names."""
    troubles = Troubles() if troubles is None else troubles
    for file in files(source):
        yield from read_file(file, source, troubles)


def read_file(file: File, source: Source, troubles: Troubles, longest: int | None = None) -> Iterator[Document]:
    """The documents of one file. What cannot be opened or read is a trouble like a bad row.

    A text of more than `longest` characters is cut into several.
    """
    path = file.path
    if not path.is_file():  # a pipe or a device may never end
        troubles.add("no readable file", str(path))
        return
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path, source, troubles)
        elif path.suffix not in (".jsonl", ".tsv") and source.target is not None:
            troubles.add("text where pairs are asked for", str(path))
        else:
            with path.open("rb") as stream:
                if path.suffix == ".jsonl":
                    yield from json_lines(str(path), stream, source, troubles)
                elif path.suffix == ".tsv" and source.target is not None:
                    yield from tab_lines(str(path), stream, source, troubles)
                else:
                    yield from text(str(path), stream, troubles, longest or LONGEST)
    except OSError as error:
        troubles.add("no readable file", f"{path}: {error.strerror or error}")


def text(name: str, stream: BinaryIO, troubles: Troubles, longest: int) -> Iterator[Document]:
    """Line ends stay as they are; a byte-order mark is no text."""
    letters = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rest, ended, empty = "", False, True
    try:
        while not ended:
            more = letters.read(longest)
            ended, found = len(more) < longest, rest + more
            cut = len(found) if ended else found.rfind("\n") + 1 or len(found)
            found, rest = found[:cut], found[cut:]
            if found.strip():
                empty = False
                yield Document(found)
        if empty:
            troubles.add("empty", name)
    except UnicodeDecodeError as error:
        troubles.add("undecodable bytes", f"{name}: {error.reason}; not read from there on")
    finally:
        letters.detach()  # whoever opened the stream closes it


def json_lines(name: str, stream: BinaryIO, source: Source, troubles: Troubles) -> Iterator[Document]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            troubles.add("undecodable bytes", f"{where}: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:
            troubles.add("broken JSON", f"{where}: {error}")
        else:
            yield from _row(row, source, where, troubles)


def tab_lines(name: str, stream: BinaryIO, source: Source, troubles: Troubles) -> Iterator[Document]:
    """Columns between tabs. The first line names them if it has the wanted ones; else they come in the wanted order."""
    names = list(dict.fromkeys(source.columns))
    for number, line in enumerate(stream, 1):
        try:
            cells = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            troubles.add("undecodable bytes", f"{name} line {number}: {error.reason} at byte {error.start}")
            continue
        if number == 1 and set(names) <= set(cells):
            names = cells
        elif line.strip():
            yield from _row(dict(zip(names, cells, strict=False)), source, f"{name} line {number}", troubles)


def _parquet(path: Path, source: Source, troubles: Troubles) -> Iterator[Document]:
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
            troubles.add("missing field", f"{path} has no column {', '.join(sorted(missing))}")
            return
        for batch in table.iter_batches(batch_size=ROWS, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield from _row(row, source, f"{path} row {number}", troubles)
    except ValueError as error:  # what pyarrow calls ArrowInvalid
        troubles.add("broken parquet", f"{path} after row {number}: {error}")


def _row(row: object, source: Source, where: str, troubles: Troubles) -> Iterator[Document]:
    if not isinstance(row, dict):
        troubles.add("missing field", f"{where} is no object")
        return
    texts = {}
    for column in source.columns:
        text = row.get(column)
        if not isinstance(text, str):
            why = f"{type(text).__name__}, not text" if column in row else "missing"
            troubles.add("missing field", f"{where}: {column!r} is {why}")
            return
        if not text.strip():
            troubles.add("empty", f"{where}: {column!r}")
            return
        try:
            text.encode()
        except UnicodeEncodeError as error:
            troubles.add("undecodable bytes", f"{where}: half a surrogate pair at character {error.start}")
            return
        texts[column] = text
    target = None if source.target is None else texts[source.target]
    yield Document(texts[source.field], target, None if source.group is None else texts[source.group])
