"""Texts to measure a model on: what training reads, and standard input."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cutaway.errors import InputError
from cutaway.train.data.documents import Document, Source, Troubles, json_lines, read_file, text
from cutaway.train.data.sources import files

LONGEST = 1 << 24
"""Characters of a text; a longer file is cut at line ends, since its tokens would fill the memory."""


def documents(paths: Sequence[Path], field: str, target: str | None, troubles: Troubles) -> Iterator[Document]:
    """The documents of all files, and of all files in directories in the order of their names."""
    for path in paths:
        source = Source(path, field, target)
        if str(path) == "-":
            yield from standard_input(source, troubles)
        else:
            for file in files(source):
                yield from read_file(file, source, troubles, LONGEST)


def standard_input(source: Source, troubles: Troubles) -> Iterator[Document]:
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("nothing is piped in, so - has nothing to read; pipe a text in or name a file")
    if source.target is not None:
        yield from json_lines("standard input", sys.stdin.buffer, source, troubles)
    else:
        yield from text("standard input", sys.stdin.buffer, troubles, LONGEST)
