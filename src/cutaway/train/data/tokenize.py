"""Tokenize documents in order. Large data is tokenized by several processes."""

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

CHUNK_CHARS, CHUNK_DOCUMENTS = 1 << 20, 4096
"""A chunk is complete when it has at least CHUNK_CHARS characters, or CHUNK_DOCUMENTS documents."""
Chunk = list[Document]


class EncodedDocuments(NamedTuple):
    """Token ids of a chunk of documents."""

    ids: NDArray[np.uint32]
    """Token ids of all documents, concatenated."""
    lengths: NDArray[np.int64]
    """Shape (documents, 2): number of token ids of each text, and of the target that follows it."""
    digests: list[bytes]
    """SHA-256 of each document's content."""
    split_keys: list[bytes]
    """Hash that determines the split of a document: the hash of its group, or of its content if it has no group."""
    num_bytes: NDArray[np.int64]
    """Number of UTF-8 bytes of the predicted text, which is the document or the target of a pair."""


def encode_documents(tokenizer: Tokenizer, chunk: Chunk) -> EncodedDocuments:
    """Encode a chunk of documents. EOS is appended to the target of a document, or to its text if it has no target."""
    texts = tokenizer.encode_batch([document.text for document in chunk])
    targets = iter(tokenizer.encode_batch([document.target for document in chunk if document.target is not None]))
    rows: list[tuple[list[int], list[int]]] = []
    for document, ids in zip(chunk, texts, strict=True):
        has_target = document.target is not None
        rows.append((ids, _append_eos(next(targets), tokenizer)) if has_target else (_append_eos(ids, tokenizer), []))
    flat = [np.array(ids, np.uint32) for row in rows for ids in row]
    return EncodedDocuments(
        np.concatenate(flat) if flat else np.zeros(0, np.uint32),
        np.array([[len(text), len(target)] for text, target in rows], np.int64).reshape(-1, 2),
        [document_digest(document) for document in chunk],
        [document_digest(d) if d.split_group is None else sha256(d.split_group.encode()).digest() for d in chunk],
        np.array([len((d.text if d.target is None else d.target).encode()) for d in chunk], np.int64),
    )


def document_digest(document: Document) -> bytes:
    """SHA-256 of the text of a document, or of text and target if it has a target."""
    text_digest = sha256(document.text.encode()).digest()
    if document.target is None:
        return text_digest
    return sha256(text_digest + sha256(document.target.encode()).digest()).digest()


def _append_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    eos_id = tokenizer.eos_token_id
    return ids if eos_id is None or (ids and ids[-1] == eos_id) else [*ids, eos_id]


def chunk_documents(documents: Iterable[Document]) -> Iterator[Chunk]:
    """Group documents into chunks of about CHUNK_CHARS characters, and at most CHUNK_DOCUMENTS documents."""
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
    """Number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_chunks(chunks: Iterable[Chunk], tokenizer: Tokenizer, num_workers: int) -> Iterator[EncodedDocuments]:
    """Encode chunks in order, in `num_workers` processes, or in this process if `num_workers` is 1.

    If a worker process cannot start or dies, its chunk is encoded in this process.
    """
    if num_workers < 2 or current_process().daemon:  # a daemon process may not have children
        for chunk in chunks:
            yield encode_documents(tokenizer, chunk)
        return
    # Processes are spawned, not forked: after a fork, the threads of torch and tokenizers may make a process hang.
    initargs = (tokenizer, tokenizer.backend.encode_special_tokens)
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_init_worker, initargs=initargs)
    pending: deque[tuple[Chunk, Future[EncodedDocuments] | None]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, _submit_chunk(pool, chunk)))
            if len(pending) > 2 * num_workers:
                yield _chunk_result(*pending.popleft(), tokenizer)
        while pending:
            yield _chunk_result(*pending.popleft(), tokenizer)
    finally:
        pool.shutdown(cancel_futures=True)


def _submit_chunk(pool: ProcessPoolExecutor, chunk: Chunk) -> Future[EncodedDocuments] | None:
    # `submit` may start a process, which would import the user's __main__ again. Workers do not need it, so replace it.
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
"""In a worker process, a list with its tokenizer. Set by `_init_worker`."""


def _init_worker(tokenizer: Tokenizer, encode_special_tokens: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process, because there is one process per core
    tokenizer.backend.encode_special_tokens = encode_special_tokens  # not part of the pickled tokenizer
    _worker_tokenizer[:] = [tokenizer]


def _encode_in_worker(chunk: Chunk) -> EncodedDocuments:
    return encode_documents(_worker_tokenizer[0], chunk)
