"""Documents for `cutaway eval`, from files in the formats of training data or from standard input."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutaway.errors import InputError
from cutaway.train.data.documents import Document, SkippedDocuments, read_file, read_jsonl, read_text
from cutaway.train.data.sources import list_source_files
from cutaway.train.recipe.schema import SourceConfig

MAX_DOCUMENT_CHARACTERS = 1 << 24
"""Maximum number of characters of a document. Longer files are split at line ends, to limit memory."""


def iter_documents(
    paths: Sequence[Path], text_column: str, target_column: str | None, skipped: SkippedDocuments
) -> Iterator[Document]:
    """Yield the documents of all files. Files in a directory are read in the order of their names."""
    for path in paths:
        source = SourceConfig(path=str(path), text_column=text_column, target_column=target_column)
        if str(path) == "-":
            yield from _iter_stdin(source, skipped)
        else:
            for file in list_source_files(source):
                yield from read_file(file, source, skipped, MAX_DOCUMENT_CHARACTERS)


def _iter_stdin(source: SourceConfig, skipped: SkippedDocuments) -> Iterator[Document]:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("- reads standard input, but nothing is piped in; pipe a text in or name a file")
    if source.target_column is not None:
        yield from read_jsonl("standard input", sys.stdin.buffer, source, skipped)
    else:
        yield from read_text("standard input", sys.stdin.buffer, skipped, MAX_DOCUMENT_CHARACTERS)
