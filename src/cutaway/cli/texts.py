"""Texts to measure a model on: files, directories of them, JSON lines and standard input."""

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from cutaway.errors import InputError

LONGEST = 1 << 24
"""Characters of a text; a longer file is cut at line ends, since its tokens would fill the memory."""
Document = tuple[str, ...]
"""A text, or a source and its target."""


@dataclass
class Texts:
    """Reads documents, and remembers what it passed over: how often each kind, and the first of it."""

    column: str = "text"
    """The field of a row of JSON that holds the text."""
    target: str | None = None
    """The field with the answer, where rows are pairs."""
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def read(self, paths: Sequence[Path]) -> Iterator[Document]:
        """The documents of all files, and of all files in directories in the order of their names.

        A file that was named must be text; in directories others are passed over.
        """
        for path in paths:
            if str(path) == "-":
                yield from self._standard_input()
            elif path.is_dir():
                yield from self._directory(path)
            else:
                yield from self._file(path)

    def pass_over(self, kind: str, example: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.examples.setdefault(kind, example[:300])

    def __str__(self) -> str:
        return "; ".join(f"{count:,} × {kind} ({self.examples[kind]})" for kind, count in self.counts.items())

    def _standard_input(self) -> Iterator[Document]:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("nothing is piped in, so - has nothing to read; pipe a text in or name a file")
        if self.target is not None:
            yield from self._rows("standard input", sys.stdin.buffer)
        else:
            yield from self._text("standard input", sys.stdin.buffer)

    def _directory(self, root: Path) -> Iterator[Document]:
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
            found += [Path(folder, name) for name in names if not name.startswith(".")]
        if not found:
            raise InputError(f"'{root}' holds no files; name a file of text or a directory that has some")
        for path in sorted(found):
            if not path.is_file():  # a pipe or a device may never end
                self.pass_over("no plain file", str(path))
                continue
            if self.target is not None and path.suffix != ".jsonl":
                self.pass_over("no JSON lines", str(path))
                continue
            try:
                yield from self._file(path)
            except InputError as error:
                self.pass_over("no text", str(error))

    def _file(self, path: Path) -> Iterator[Document]:
        if self.target is not None and path.suffix != ".jsonl":
            raise InputError(f"'{path}' has no pairs; with --target give JSON lines, in a file that ends in .jsonl")
        if path.suffix == ".parquet":
            raise InputError(f"'{path}' is parquet, which is not read here; convert it to JSON lines")
        try:
            with path.open("rb") as stream:
                yield from (self._rows if path.suffix == ".jsonl" else self._text)(f"'{path}'", stream)
        except OSError as error:
            raise InputError(f"'{path}' cannot be read: {error.strerror or error}; name a text file") from None

    def _text(self, name: str, stream: BinaryIO) -> Iterator[Document]:
        """Line ends stay as they are; a byte-order mark is no text."""
        wrapped = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rest, ended, empty = "", False, True
        try:
            while not ended:
                more = wrapped.read(LONGEST)
                ended, text = len(more) < LONGEST, rest + more
                cut = len(text) if ended else text.rfind("\n") + 1 or len(text)
                text, rest = text[:cut], text[cut:]
                if text.strip():
                    empty = False
                    yield (text,)
        except UnicodeDecodeError as error:
            raise InputError(f"{name} is no UTF-8 text ({error.reason}); convert it first") from None
        finally:
            wrapped.detach()
        if empty:
            raise InputError(f"{name} is empty; there is no text in it to measure")

    def _rows(self, name: str, stream: BinaryIO) -> Iterator[Document]:
        for number, line in enumerate(stream, 1):
            where = f"{name} line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                self.pass_over("undecodable bytes", f"{where}: {error.reason}")
            except (ValueError, RecursionError) as error:
                self.pass_over("broken JSON", f"{where}: {error}")
            else:
                if text.strip():
                    yield from self._row(where, row)

    def _row(self, where: str, row: object) -> Iterator[Document]:
        texts = []
        for column in (self.column, *([] if self.target is None else [self.target])):
            text = row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                self.pass_over("missing field", f"{where} has no text in {column!r}")
                return
            if not text.strip():
                self.pass_over("empty", f"{where}: {column!r}")
                return
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                self.pass_over("undecodable bytes", f"{where}: half a surrogate pair")
                return
            texts.append(text)
        yield tuple(texts)
