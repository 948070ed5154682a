"""What a recipe reads, as data: texts, and how they become tokens."""

from typing import Annotated, Literal

from pydantic import Field

from cutaway.config.part import TAGGED, Count, Part, Positive, default_kind

STANDARD_LIBRARY = "python-stdlib"
"""The path that means the source code of Python's own standard library."""
DATES = "dates"
"""The path that means dates in many languages, as pairs of the fields text and iso."""


class Bytes(Part):
    """Every byte is a token."""

    kind: Literal["bytes"] = "bytes"


class Bpe(Part):
    """Byte-level BPE, trained on the data."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: Count = 4096


class Ready(Part):
    """The tokenizer that lies in a directory."""

    kind: Literal["ready"] = "ready"
    path: str


class Source(Part):
    """Texts: a file, a directory of files, Python's own standard library, or dates in many languages."""

    path: str = STANDARD_LIBRARY
    """Empty in a recipe whose text its user has to name."""
    field: str = "text"
    """The column of JSON lines, parquet or TSV that holds the text."""
    target: str | None = None
    """The column that holds the answer, for sequence to sequence and prefix."""
    group: str | None = None
    """The column whose equal values are learned from or looked at, never both; each document by itself, without."""
    weight: Positive | None = None
    """How often it is read beside the others; as often as it is long, unless any has a weight."""


class Data(Part):
    """What is read."""

    sources: Annotated[tuple[Source, ...], Field(min_length=1)] = (Source(),)
    tokenizer: Annotated[Annotated[Bytes | Bpe | Ready, TAGGED], default_kind("bytes")] | None = None
    """Bytes, unless given; or that of the checkpoint which is trained further."""
    length: Count = 256
    """Tokens of a sequence."""
    borders: bool = True
    """Whether a text sees only itself where several stand in a sequence."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The share of documents that is kept for looking at."""
