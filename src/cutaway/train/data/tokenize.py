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

from cutaway.tokenizer import Tokenizer
from cutaway.train.data.documents import Document

CHUNK_CHARS = 1 << 20
"""Characters that are tokenized at a time."""
CHUNK_DOCUMENTS = 4096
"""Documents that are tokenized at a time."""
Chunk = list[Document]


class EncodedDocuments(NamedTuple):
    """Some documents as ids."""

    ids: NDArray[np.uint32]
    """All documents', end to end."""
    lengths: NDArray[np.int64]
    """(documents, 2): how many ids are the text's, and how many behind them the target's."""
    digests: list[bytes]
    """Of each document's content."""
    split_keys: list[bytes]
    """What decides on which side of the split a document falls: its group, or else its content."""
    num_bytes: NDArray[np.int64]
    """UTF-8 bytes of what is to be learnt: the text, or of a pair the target."""


def encode_documents(tokenizer: Tokenizer, chunk: Chunk) -> EncodedDocuments:
    """A text ends with EOS. Of a pair the target does; its source is what the tokenizer makes of any prompt."""
    texts = tokenizer.encode_batch([document.text for document in chunk])
    answers = iter(tokenizer.encode_batch([document.target for document in chunk if document.target is not None]))
    rows: list[tuple[list[int], list[int]]] = []
    for document, ids in zip(chunk, texts, strict=True):
        paired = document.target is not None
        rows.append((ids, _append_eos(next(answers), tokenizer)) if paired else (_append_eos(ids, tokenizer), []))
    flat = [np.array(ids, np.uint32) for row in rows for ids in row]
    return EncodedDocuments(
        np.concatenate(flat) if flat else np.zeros(0, np.uint32),
        np.array([[len(text), len(target)] for text, target in rows], np.int64).reshape(-1, 2),
        [document_digest(document) for document in chunk],
        [document_digest(d) if d.split_group is None else sha256(d.split_group.encode()).digest() for d in chunk],
        np.array([len((d.text if d.target is None else d.target).encode()) for d in chunk], np.int64),
    )


def document_digest(document: Document) -> bytes:
    own = sha256(document.text.encode()).digest()
    return own if document.target is None else sha256(own + sha256(document.target.encode()).digest()).digest()


def _append_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]


def chunk_documents(documents: Iterable[Document]) -> Iterator[Chunk]:
    chunk: Chunk = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text) + len(document.target or "")
        if size >= CHUNK_CHARS or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_chunks(chunks: Iterable[Chunk], tokenizer: Tokenizer, num_workers: int) -> Iterator[EncodedDocuments]:
    """The chunks in their order. What processes cannot be had for, or died over, is done here."""
    if num_workers < 2 or current_process().daemon:  # which may have no children
        for chunk in chunks:
            yield encode_documents(tokenizer, chunk)
        return
    # Spawned: a copy of a process with threads, which torch and tokenizers start, may hang.
    start = (tokenizer, tokenizer.backend.encode_special_tokens)
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_init_worker, initargs=start)
    waiting: deque[tuple[Chunk, Future[EncodedDocuments] | None]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, _submit_chunk(pool, chunk)))
            if len(waiting) > 2 * num_workers:
                yield _chunk_result(*waiting.popleft(), tokenizer)
        while waiting:
            yield _chunk_result(*waiting.popleft(), tokenizer)
    finally:
        pool.shutdown(cancel_futures=True)


def _submit_chunk(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[EncodedDocuments] | None:
    # This may start a process, which would begin with running the user's program again; it needs nothing of it.
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        return pool.submit(_encode_in_worker, chunk)
    except (BrokenProcessPool, OSError):
        return None
    finally:
        sys.modules["__main__"] = main


def _chunk_result(chunk: Chunk, future: Future[EncodedDocuments] | None, tokenizer: Tokenizer) -> EncodedDocuments:
    try:
        return encode_documents(tokenizer, chunk) if future is None else future.result()
    except BrokenProcessPool:
        return encode_documents(tokenizer, chunk)


_worker_tokenizer: list[Tokenizer] = []
"""A worker's tokenizer."""


def _init_worker(tokenizer: Tokenizer, encode_special_tokens: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: there is a process for each core
    tokenizer.backend.encode_special_tokens = encode_special_tokens  # which does not travel with it
    _worker_tokenizer[:] = [tokenizer]


def _encode_in_worker(chunk: Chunk) -> EncodedDocuments:
    return encode_documents(_worker_tokenizer[0], chunk)
