"""Prepare data: tokenize sources once, into memory-mapped files in a cache directory that is written atomically."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.train.checkpoint.atomic_directory import (
    HIDDEN_NAME_PATTERN,
    fsync_directory,
    list_directory,
    remove_hidden_directory,
    rename_into_place,
    temporary_directory,
    write_file,
)
from cutaway.train.data.documents import MAX_DOCUMENT_CHARS, SkippedDocuments, read_file
from cutaway.train.data.memmap import SplitWriter, TokenSplit
from cutaway.train.data.sources import SourceFile, list_source_files
from cutaway.train.data.tokenize import chunk_documents, encode_chunks, num_cores
from cutaway.train.recipe.schema import SourceConfig

CACHE_FORMAT = 2
"""Version of the cache. Increase it when the code reads, tokenizes or splits the same sources differently."""
MIN_PARALLEL_BYTES = 1 << 26
"""Minimum total size of the source files in bytes for tokenizing with several processes. Below, one is faster."""
MIN_DOCUMENTS, MIN_DOCUMENT_CHARS = 64, 256
"""If there are fewer than MIN_DOCUMENTS text files, the files are split into about MIN_DOCUMENTS documents, of at least
MIN_DOCUMENT_CHARS characters."""
SourceFiles = list[tuple[SourceConfig, SourceFile]]


@dataclass(frozen=True)
class PreparedData:
    """Tokenized documents of the training and validation splits, in memory-mapped files."""

    train: TokenSplit
    validation: TokenSplit
    fingerprint: str
    """SHA-256 of documents and token ids. It does not depend on the location of the files, and stays the same if the
    tokenizer is saved and loaded."""
    skipped: SkippedDocuments
    directory: Path


def prepare_data(
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    directory: str | os.PathLike[str],
    *,
    validation_split: float,
    seed: int,
) -> PreparedData:
    """Tokenize the documents of the sources, in order, into a subdirectory of the cache directory `directory`.

    The weights of sources are ignored; to mix sources by weight, call this function once per source. Files are read
    again only if their paths, sizes or modification times change.
    """
    if len({source.target_column is None for source in sources}) > 1:
        raise InputError(
            "data.sources[].target_column is set for some sources only; set it for all sources, or for none"
        )
    source_files = _list_source_files(sources)
    directory = Path(directory)
    prepared_directory = directory / _cache_key(source_files, tokenizer, validation_split, seed)
    prepared = _open_prepared_data(prepared_directory)
    if prepared is None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in list_directory(directory):
                if HIDDEN_NAME_PATTERN.fullmatch(path.name):  # left by a killed process, or locked by a running one
                    remove_hidden_directory(path)
            with temporary_directory(prepared_directory) as temporary:
                _write_splits(source_files, tokenizer, temporary, validation_split, seed)
                if _list_source_files(sources) != source_files:
                    raise InputError("source files changed while they were read; run again when nothing writes to them")
                _check_split_sizes(temporary, validation_split)
                if _open_prepared_data(prepared_directory) is None:  # no other process has written the same data
                    replaced = rename_into_place(temporary, prepared_directory)
                    if replaced is not None:
                        remove_hidden_directory(replaced)
            fsync_directory(directory)
        except OSError as error:
            raise InputError(
                f"cannot write the prepared data to '{directory}' ({error.strerror or error}); free disk space, or set"
                " the environment variable CUTAWAY_CACHE to another directory"
            ) from error
        prepared = _open_prepared_data(prepared_directory)
    if prepared is None:
        raise InputError(f"'{prepared_directory}' is damaged right after it was written; check the disk")
    return prepared


def _open_prepared_data(directory: Path) -> PreparedData | None:
    """Open prepared data. None if the directory does not exist or is incomplete."""
    try:
        metadata: dict[str, Any] = json.loads((directory / "data.json").read_text(encoding="utf-8"))
        train, validation = (
            TokenSplit.open(directory, name, metadata[name], metadata["has_targets"])
            for name in ("train", "validation")
        )
        skipped = SkippedDocuments(**metadata["skipped"])
        return PreparedData(train, validation, str(metadata["fingerprint"]), skipped, directory)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _list_source_files(sources: Sequence[SourceConfig]) -> SourceFiles:
    return [(source, file) for source in sources for file in list_source_files(source)]


def _cache_key(source_files: SourceFiles, tokenizer: Tokenizer, validation_split: float, seed: int) -> str:
    """Hash of all that the prepared data depends on. For a file, these are path, size and modification time."""
    backend = tokenizer.backend
    key = sha256(f"{CACHE_FORMAT} {validation_split!r} {seed} {backend.encode_special_tokens}".encode())
    key.update(
        json.dumps([type(tokenizer).__name__, sorted(tokenizer.special_tokens_map.items()), backend.to_str()]).encode()
    )
    for source, file in source_files:
        row = [str(file.path.absolute()), file.name, file.size, file.mtime_ns]
        row += [source.text_column, source.target_column, source.group_column]
        key.update(json.dumps(row).encode() + b"\n")
    return key.hexdigest()[:32]


def _write_splits(
    source_files: SourceFiles, tokenizer: Tokenizer, temporary: Path, validation_split: float, seed: int
) -> None:
    skipped = SkippedDocuments()
    # There are three hashes, so that the fingerprint does not depend on how documents are grouped into chunks.
    contents, lengths, ids = sha256(), sha256(), sha256()
    has_targets = any(source.target_column is not None for source, _ in source_files)
    max_token_id = max([tokenizer.vocab_size - 1, *tokenizer.all_special_ids, *tokenizer.backend.get_vocab().values()])
    num_workers = min(num_cores(), 32) if _total_size(source_files) >= MIN_PARALLEL_BYTES else 1
    max_chars = max_document_chars(source_files)
    documents = (doc for source, file in source_files for doc in read_file(file, source, skipped, max_chars))
    with (
        SplitWriter(temporary, "train", max_token_id, has_targets) as train,
        SplitWriter(temporary, "validation", max_token_id, has_targets) as validation,
    ):
        for encoded in encode_chunks(chunk_documents(documents), tokenizer, num_workers):
            has_tokens = encoded.lengths[:, : 2 if has_targets else 1].min(1) > 0
            for _ in np.flatnonzero(~has_tokens):
                skipped.add("no tokens", "a text that the tokenizer encodes to nothing")
            keys = encoded.split_keys
            is_validation = np.array([is_validation_document(key, seed, validation_split) for key in keys], bool)
            train.append(encoded, has_tokens & ~is_validation)
            validation.append(encoded, has_tokens & is_validation)
            contents.update(b"".join(encoded.digests))
            lengths.update(encoded.lengths.astype("<i8").tobytes())
            ids.update(encoded.ids.astype("<u4").tobytes())
        fingerprint = sha256(contents.digest() + lengths.digest() + ids.digest()).hexdigest()
        metadata = {
            "format": CACHE_FORMAT,
            "fingerprint": fingerprint,
            "has_targets": has_targets,
            "skipped": asdict(skipped),
            "train": train.finalize(),
            "validation": validation.finalize(),
            "num_files": len(source_files),
        }
    write_file(temporary / "data.json", json.dumps(metadata, indent=1).encode())


def max_document_chars(source_files: SourceFiles) -> int:
    """Maximum number of characters of a document. Longer text files are split into several documents.

    The maximum is lower if there are only a few text files, so that both training and validation split have documents.
    """
    has_rows = any(file.path.suffix in (".jsonl", ".parquet", ".tsv") for _, file in source_files)
    if len(source_files) >= MIN_DOCUMENTS or has_rows:
        return MAX_DOCUMENT_CHARS
    return min(MAX_DOCUMENT_CHARS, max(MIN_DOCUMENT_CHARS, _total_size(source_files) // MIN_DOCUMENTS))


def _total_size(source_files: SourceFiles) -> int:
    return sum(file.size for _, file in source_files)


def is_validation_document(split_key: bytes, seed: int, validation_split: float) -> bool:
    """Whether a document is in the validation split. This depends on its split key, not on the other documents."""
    draw = sha256(f"{seed}:".encode() + split_key).digest()[:8]
    return int.from_bytes(draw, "big") < int(validation_split * 2**64)


def _check_split_sizes(directory: Path, validation_split: float) -> None:
    prepared = _open_prepared_data(directory)
    if prepared is None:
        return  # reported by the caller, which opens it again
    count = prepared.train.num_documents + prepared.validation.num_documents
    if not count:
        reason = f"all were skipped: {prepared.skipped}" if prepared.skipped.total else "the files contain none"
        raise InputError(f"data.sources has no documents ({reason}); use files that contain text")
    if not prepared.train.num_documents or (validation_split and not prepared.validation.num_documents):
        split = "validation" if prepared.train.num_documents else "training"
        raise InputError(
            f"the {split} split has none of the {count} documents with data.validation_split = {validation_split}; use"
            " more documents, e.g. the lines of a .jsonl file, or change data.validation_split or training.seed"
        )
