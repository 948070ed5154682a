"""Batches of a corpus: texts or token ids to rows of at most `seq_len` tokens, padded or packed."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters.tokenizer import TokenizerLike

Corpus = Iterable[str] | Iterable[Sequence[int]] | Iterable[Tensor] | str | Path
"""Texts, token id sequences, or the path of a UTF-8 text file, in which blank lines separate the texts."""


class Piece(NamedTuple):
    """Consecutive tokens of one sequence, which start at position `start` in it."""

    sequence: int
    start: int
    tokens: list[int]


class TokenBatch(NamedTuple):
    """Rows of tokens, (B, T). Padding has `real` False. The positions of a piece start at 0."""

    tokens: Tensor
    positions: Tensor
    sequences: Tensor
    """Index of the corpus's sequence that the token is from. −1 for padding."""
    real: Tensor
    document_ids: Tensor | None
    """Number of the token's piece in its row, if rows are packed."""


def iterate_batches(
    corpus: Corpus, tokenizer: TokenizerLike | None, *, seq_len: int, batch_size: int, packing: bool
) -> Iterator[TokenBatch]:
    """Yield the batches of a corpus. They depend only on the arguments, so that an interrupted run can be resumed.

    Without packing, a row is one sequence, and padding is on the right. With packing, a row has several sequences; a
    sequence that does not fit into the rest of a row is continued in the next row. In both cases, a sequence longer
    than `seq_len` is divided into pieces that do not attend to each other.
    """
    sequences = _iterate_sequences(corpus, tokenizer)
    rows = _pack_rows(sequences, seq_len) if packing else _split_rows(sequences, seq_len)
    while batch := list(islice(rows, batch_size)):
        yield _build_batch(batch, packing=packing)


def _iterate_sequences(corpus: Corpus, tokenizer: TokenizerLike | None) -> Iterator[list[int]]:
    items: Iterable[str] | Iterable[Sequence[int]] | Iterable[Tensor]
    items = _read_paragraphs(Path(corpus)) if isinstance(corpus, str | Path) else corpus
    for number, item in enumerate(items):
        if isinstance(item, str):
            if tokenizer is None:
                raise InputError("the corpus has texts, but there is no tokenizer; pass a checkpoint or token ids")
            yield tokenizer.encode(item, add_special_tokens=True)
            continue
        try:
            ids = item.tolist() if isinstance(item, Tensor) else [int(token) for token in item]
        except (TypeError, ValueError):
            problem = f"item {number} of the corpus is a {type(item).__name__}"
            raise InputError(f"{problem}; pass texts, or sequences of token ids") from None
        if not all(isinstance(token, int) for token in ids):
            raise InputError(f"item {number} of the corpus is not one row of token ids; pass tensors of shape (T,)")
        yield ids


def _read_paragraphs(path: Path) -> Iterator[str]:
    """Yield the texts of a file, which blank lines separate. The file is read line by line."""
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines).strip()
                    lines = []
    except OSError as error:
        raise InputError(f"cannot read the corpus '{path}': {error.strerror}; pass a UTF-8 text file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the corpus '{path}' is not UTF-8 ({error.reason}); convert the file") from None
    if lines:
        yield "".join(lines).strip()


def _split_rows(sequences: Iterable[list[int]], seq_len: int) -> Iterator[list[Piece]]:
    for number, ids in enumerate(sequences):
        for start in range(0, len(ids), seq_len):
            yield [Piece(number, start, ids[start : start + seq_len])]


def _pack_rows(sequences: Iterable[list[int]], seq_len: int) -> Iterator[list[Piece]]:
    row: list[Piece] = []
    free = seq_len
    for number, ids in enumerate(sequences):
        start = 0
        while start < len(ids):
            piece = Piece(number, start, ids[start : start + free])
            row.append(piece)
            start += len(piece.tokens)
            free -= len(piece.tokens)
            if free == 0:
                yield row
                row, free = [], seq_len
    if row:
        yield row


def _build_batch(rows: Sequence[list[Piece]], *, packing: bool) -> TokenBatch:
    length = max(sum(len(piece.tokens) for piece in row) for row in rows)
    shape = (len(rows), length)
    tokens, positions, documents = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    sequences = torch.full(shape, -1)
    for index, row in enumerate(rows):
        end = 0
        for number, piece in enumerate(row):
            part = slice(end, end + len(piece.tokens))
            end = part.stop
            tokens[index, part] = torch.tensor(piece.tokens)
            positions[index, part] = torch.arange(len(piece.tokens))
            sequences[index, part] = piece.sequence
            documents[index, part] = number
        documents[index, end:] = len(row)
    return TokenBatch(tokens, positions, sequences, sequences >= 0, documents if packing else None)
