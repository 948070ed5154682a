"""Documents to ids, in several processes where there is much text, in the documents' order."""

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from hashlib import sha256
from multiprocessing import current_process, get_context
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutaway.text import Tokenizer
from cutaway.train.data.documents import Document

CHUNK = 1 << 20
"""Characters that are tokenised at a time."""
MOST = 4096
"""Documents that are tokenised at a time."""
Chunk = list[Document]


class Encoded(NamedTuple):
    """Some documents as ids."""

    ids: NDArray[np.uint32]
    """All documents', end to end."""
    lengths: NDArray[np.int64]
    """(documents, 2): how many ids are the text's, and how many behind them the target's."""
    digests: list[bytes]
    """Of each document's content."""
    sides: list[bytes]
    """What decides on which side of the split a document falls: its group, or else its content."""
    sizes: NDArray[np.int64]
    """UTF-8 bytes of what is to be learnt: the text, or of a pair the target."""


def encode(tokenizer: Tokenizer, chunk: Chunk) -> Encoded:
    """A text ends with EOS. Of a pair the target does; its source is what the tokenizer makes of any prompt."""
    texts = tokenizer.encode_batch([document.text for document in chunk])
    answers = iter(tokenizer.encode_batch([document.target for document in chunk if document.target is not None]))
    rows: list[tuple[list[int], list[int]]] = []
    for document, ids in zip(chunk, texts, strict=True):
        paired = document.target is not None
        rows.append((ids, _ended(next(answers), tokenizer)) if paired else (_ended(ids, tokenizer), []))
    flat = [np.array(ids, np.uint32) for row in rows for ids in row]
    return Encoded(
        np.concatenate(flat) if flat else np.zeros(0, np.uint32),
        np.array([[len(text), len(target)] for text, target in rows], np.int64).reshape(-1, 2),
        [digest(document) for document in chunk],
        [digest(d) if d.group is None else sha256(d.group.encode()).digest() for d in chunk],
        np.array([len((d.text if d.target is None else d.target).encode()) for d in chunk], np.int64),
    )


def digest(document: Document) -> bytes:
    own = sha256(document.text.encode()).digest()
    return own if document.target is None else sha256(own + sha256(document.target.encode()).digest()).digest()


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.eos_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def chunks(documents: Iterable[Document]) -> Iterator[Chunk]:
    chunk: Chunk = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text) + len(document.target or "")
        if size >= CHUNK or len(chunk) >= MOST:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(work: Iterable[Chunk], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """The chunks in their order. What processes cannot be had for, or died over, is done here."""
    if workers < 2 or current_process().daemon:  # which may have no children
        for chunk in work:
            yield encode(tokenizer, chunk)
        return
    # Spawned: a copy of a process with threads, which torch and tokenizers start, may hang.
    start = (tokenizer, tokenizer.backend.encode_special_tokens)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin, initargs=start)
    waiting: deque[tuple[Chunk, Future[Encoded] | None]] = deque()
    try:
        for chunk in work:
            waiting.append((chunk, _submit(pool, chunk)))
            if len(waiting) > 2 * workers:
                yield _result(*waiting.popleft(), tokenizer)
        while waiting:
            yield _result(*waiting.popleft(), tokenizer)
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[Encoded] | None:
    # This may start a process, which would begin with running the user's program again; it needs nothing of it.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(_encode_here, chunk)
    except (BrokenProcessPool, OSError):
        return None
    finally:
        sys.modules["__main__"] = main


def _result(chunk: Chunk, future: Future[Encoded] | None, tokenizer: Tokenizer) -> Encoded:
    try:
        return encode(tokenizer, chunk) if future is None else future.result()
    except BrokenProcessPool:
        return encode(tokenizer, chunk)


_own: list[Tokenizer] = []
"""A worker's tokenizer."""


def _begin(tokenizer: Tokenizer, split_special: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there is a process for each core
    tokenizer.backend.encode_special_tokens = split_special  # which does not travel with it
    _own[:] = [tokenizer]


def _encode_here(chunk: Chunk) -> Encoded:
    return encode(_own[0], chunk)
