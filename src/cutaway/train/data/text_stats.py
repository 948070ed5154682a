"""Size and form of text files, from which a recipe is chosen (`recipe/auto.py`)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cutaway.errors import InputError
from cutaway.train.data.documents import SkippedDocuments, read_file
from cutaway.train.data.prepare import is_validation_document, max_document_chars
from cutaway.train.data.sources import SourceFile, list_source_files
from cutaway.train.data.tokenize import document_digest
from cutaway.train.recipe.schema import SourceConfig

SAMPLE_BYTES = 1 << 22
"""Number of bytes of text that are read. The size of a larger text is estimated from them."""
ROW_SUFFIXES = (".jsonl", ".parquet")
TABLE_SUFFIXES = (".csv", ".json", ".xlsx")
FINE_TUNING_COLUMNS = ("messages", "conversations", "instruction", "prompt", "chosen", "label")
"""Columns of data for fine-tuning, which has no text column."""


@dataclass(frozen=True)
class TextStats:
    """Size of the text of some files, and how well it can be split."""

    num_bytes: int
    documents: tuple[tuple[bytes, int], ...]
    """Digest and number of bytes of each document of the sample."""
    is_complete: bool
    """Whether the sample is the whole text."""
    first_words: str

    def validation_bytes(self, validation_split: float, seed: int) -> int:
        """Number of bytes of the sample that are in the validation split."""
        return sum(size for key, size in self.documents if is_validation_document(key, seed, validation_split))


def resolve_text_sources(paths: Sequence[str | Path], text_column: str | None = None) -> list[SourceConfig]:
    """Sources of the files or directories. Without `text_column`, it is chosen from the first row of each source."""
    sources = []
    for path in paths:
        source = SourceConfig(path=str(path), text_column=text_column or "text")
        files = list_source_files(source)
        _check_suffixes(files)
        rows = next((file.path for file in files if file.path.suffix == ".jsonl"), None)
        if text_column is None and rows is not None:
            source = source.replace(text_column=_choose_text_column(rows))
        sources.append(source)
    return sources


def measure_text(sources: Sequence[SourceConfig]) -> TextStats:
    """Read up to SAMPLE_BYTES of the sources. Raises InputError if they contain no text."""
    files = [(source, file) for source in sources for file in list_source_files(source)]
    max_chars, skipped = max_document_chars(files), SkippedDocuments()
    documents: list[tuple[bytes, int]] = []
    first_words, num_bytes, file_bytes, is_complete = "", 0, 0, True
    for source, file in files:
        if num_bytes >= SAMPLE_BYTES:
            is_complete = False
            break
        for document in read_file(file, source, skipped, max_chars):
            first_words = first_words or " ".join(document.text.split()[:4])[:40]
            size = len(document.text.encode())
            documents.append((document_digest(document), size))
            num_bytes += size
            if num_bytes >= SAMPLE_BYTES and file.size > 2 * SAMPLE_BYTES:
                is_complete = False
                break
        file_bytes += min(file.size, SAMPLE_BYTES) if not is_complete else file.size
    if not documents:
        reason = f": {skipped}" if skipped.total else ""
        raise InputError(f"'{sources[0].path}' contains no text{reason}; pass a UTF-8 text file or a .jsonl file")
    total = sum(file.size for _, file in files)
    estimate = num_bytes if is_complete else round(num_bytes * total / max(1, file_bytes))
    return TextStats(estimate, tuple(documents), is_complete, first_words)


def _check_suffixes(files: Sequence[SourceFile]) -> None:
    [only] = files if len(files) == 1 else [None]
    if only is not None and only.path.suffix in TABLE_SUFFIXES:
        raise InputError(
            f"'{only.path}' is a {only.path.suffix} file, not a text; write its texts to a .jsonl file with one object"
            ' per line, {"text": "…"}, or to a .txt file'
        )


def _choose_text_column(path: Path) -> str:
    """Name of the text column of a JSON Lines file: 'text', or the only column with strings."""
    row = _first_row(path)
    if row is None or "text" in row:
        return "text"
    columns = [name for name, value in row.items() if isinstance(value, str)]
    if any(name in row for name in FINE_TUNING_COLUMNS):
        raise InputError(
            f"the rows of '{path}' have the columns {', '.join(row)}, which are data for fine-tuning a checkpoint;"
            " `cutaway train --list` lists the recipes for it, which take --base SOURCE and --data FILE. To train on"
            " one of the columns as plain text, pass --text-column"
        )
    if len(columns) != 1:
        names = ", ".join(row) or "none"
        raise InputError(f"the rows of '{path}' have no column 'text' (columns: {names}); pass --text-column NAME")
    return columns[0]


def _first_row(path: Path) -> dict[str, object] | None:
    """First valid row of a JSON Lines file. None if there is none among the first lines."""
    try:
        with path.open("rb") as stream:
            for line in islice(stream, 100):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    return row
    except OSError as error:
        raise InputError(f"'{path}' cannot be read: {error.strerror or error}; check its permissions") from None
    return None
