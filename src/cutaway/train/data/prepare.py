"""Sources to ids on the disk, once: what is there already is opened, what is half-done is never taken for whole."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import InputError
from cutaway.tokenizer import Tokenizer
from cutaway.train.checkpoint.atomic_directory import fsync_directory
from cutaway.train.data.documents import MAX_DOCUMENT_CHARS, Document, SkippedDocuments, read_file
from cutaway.train.data.memmap import SplitWriter, TokenSplit
from cutaway.train.data.sources import SourceFile, TextSource, list_source_files
from cutaway.train.data.tokenize import chunk_documents, encode_chunks, num_cores

CACHE_FORMAT = 2
"""To be raised whenever the same sources would be read, tokenized or split in another way."""
MIN_PARALLEL_BYTES = 1 << 26
"""Bytes of files from which on starting processes pays."""
MIN_DOCUMENTS, MIN_DOCUMENT_CHARS = 64, 256
"""Fewer files of text than this are cut into about so many documents, of at least so many characters."""
STALE_SECONDS = 3600
"""Seconds after which a half-written folder that nobody writes to is one of a process that was killed."""
ProgressFn = Callable[[int, int], None]
SourceFiles = list[tuple[TextSource, SourceFile]]


@dataclass(frozen=True)
class PreparedData:
    """Documents as ids, in memory maps."""

    train: TokenSplit
    validation: TokenSplit
    fingerprint: str
    """sha256 over the documents' contents and what the tokenizer made of them: equal data has equal ones, wherever it
    lies, and with a tokenizer that was saved and loaded since."""
    skipped: SkippedDocuments
    directory: Path

    @property
    def num_bytes(self) -> dict[str, int]:
        """UTF-8 bytes, for bits per byte."""
        return {"train": self.train.num_bytes, "validation": self.validation.num_bytes}


def prepare_data(
    sources: Sequence[TextSource],
    tokenizer: Tokenizer,
    directory: str | os.PathLike[str],
    *,
    validation_split: float,
    seed: int,
    progress: ProgressFn | None = None,
) -> PreparedData:
    """The sources' documents, one source after the other, as ids in a folder of `directory`.

    Weights have no say here: sources that are read more often than others are prepared each by itself and mixed.
    Nothing is read again while names, sizes and times of the files are the same; `progress` is told bytes done and all.
    """
    if not 0 <= validation_split < 1:
        raise InputError(
            f"validation_split is {validation_split}; give a share of the documents from 0 up to, but not, 1"
        )
    if len({source.target_column is None for source in sources}) > 1:
        raise InputError("some sources have a target and some have none; give each one, or prepare them apart")
    listed = _list_source_files(sources)
    directory = Path(directory)
    folder = directory / _cache_key(listed, tokenizer, validation_split, seed)
    found = open_prepared_data(folder)
    if found is None:
        try:
            _build(sources, listed, tokenizer, folder, validation_split, seed, progress)
        except OSError as error:
            raise InputError(
                f"the data cannot be written to '{directory}' ({error.strerror or error}); make room, or name another"
            ) from error
        found = open_prepared_data(folder)
    if found is None:
        raise InputError(f"'{folder}' was damaged as soon as it was written; check the disk, or name another directory")
    return found


def open_prepared_data(directory: Path) -> PreparedData | None:
    """What was prepared earlier, or None where nothing is, or nothing whole."""
    try:
        about: dict[str, Any] = json.loads((directory / "data.json").read_text(encoding="utf-8"))
        parts = [
            TokenSplit.open(directory, name, about[name], about["has_targets"]) for name in ("train", "validation")
        ]
        return PreparedData(
            parts[0], parts[1], str(about["fingerprint"]), SkippedDocuments(**about["skipped"]), directory
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _list_source_files(sources: Sequence[TextSource]) -> SourceFiles:
    return [(source, file) for source in sources for file in list_source_files(source)]


def _cache_key(source_files: SourceFiles, tokenizer: Tokenizer, validation_split: float, seed: int) -> str:
    """Names everything that the folder's content follows from; for files, what tells that one was changed."""
    backend = tokenizer.backend
    name = sha256(f"{CACHE_FORMAT} {validation_split!r} {seed} {backend.encode_special_tokens}".encode())
    name.update(
        json.dumps([type(tokenizer).__name__, sorted(tokenizer.special_tokens_map.items()), backend.to_str()]).encode()
    )
    for source, file in source_files:
        row = [str(file.path.absolute()), file.name, file.size, file.mtime_ns]
        row += [source.text_column, source.target_column, source.group_column]
        name.update(json.dumps(row).encode() + b"\n")
    return name.hexdigest()[:32]


def _build(
    sources: Sequence[TextSource],
    source_files: SourceFiles,
    tokenizer: Tokenizer,
    directory: Path,
    validation_split: float,
    seed: int,
    progress: ProgressFn | None,
) -> None:
    """Everything is written aside, and gets its name when it is on the disk."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale_directories(directory.parent)
    aside = Path(tempfile.mkdtemp(prefix=".tmp-", dir=directory.parent))
    try:
        _write_splits(source_files, tokenizer, aside, validation_split, seed, progress)
        if _list_source_files(sources) != source_files:
            raise InputError("files changed while they were read; run it again when nothing writes to them")
        if (made := open_prepared_data(aside)) is not None:
            _check_split_sizes(made, validation_split)
        aside.chmod(0o777 & ~_current_umask())
        if directory.exists() and open_prepared_data(directory) is None:
            shutil.rmtree(directory)
        try:
            aside.rename(directory)
        except OSError:
            if open_prepared_data(directory) is None:  # otherwise another process has made the same meanwhile
                raise
        fsync_directory(directory.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_splits(
    source_files: SourceFiles,
    tokenizer: Tokenizer,
    temporary: Path,
    validation_split: float,
    seed: int,
    progress: ProgressFn | None,
) -> None:
    # Apart, so that it does not matter how many documents were encoded together.
    troubles, contents, lengths, ids = SkippedDocuments(), sha256(), sha256(), sha256()
    pairs = any(source.target_column is not None for source, _ in source_files)
    largest = max([tokenizer.vocab_size - 1, *tokenizer.all_special_ids, *tokenizer.backend.get_vocab().values()])
    workers = min(num_cores(), 32) if sum(file.size for _, file in source_files) >= MIN_PARALLEL_BYTES else 1
    documents = _iter_documents(source_files, troubles, progress)
    with (
        SplitWriter(temporary, "train", largest, pairs) as train,
        SplitWriter(temporary, "validation", largest, pairs) as kept,
    ):
        for encoded in encode_chunks(chunk_documents(documents), tokenizer, workers):
            some = encoded.lengths[:, : 2 if pairs else 1].min(1) > 0
            for _ in np.flatnonzero(~some):
                troubles.add("no tokens", "a text that the tokenizer makes nothing of")
            held = np.array([is_validation_document(side, seed, validation_split) for side in encoded.split_keys], bool)
            train.append(encoded, some & ~held)
            kept.append(encoded, some & held)
            contents.update(b"".join(encoded.digests))
            lengths.update(encoded.lengths.astype("<i8").tobytes())
            ids.update(encoded.ids.astype("<u4").tobytes())
        fingerprint = sha256(contents.digest() + lengths.digest() + ids.digest()).hexdigest()
        about = {"format": CACHE_FORMAT, "fingerprint": fingerprint, "has_targets": pairs, "skipped": asdict(troubles)}
        about |= {"train": train.finalize(), "validation": kept.finalize(), "num_files": len(source_files)}
    with (temporary / "data.json").open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def max_document_chars(source_files: SourceFiles) -> int:
    """How long a document may be: a few files of text are cut, so that some of it can be kept for looking at."""
    if len(source_files) >= MIN_DOCUMENTS or any(
        file.path.suffix in (".jsonl", ".parquet", ".tsv") for _, file in source_files
    ):
        return MAX_DOCUMENT_CHARS
    return min(MAX_DOCUMENT_CHARS, max(MIN_DOCUMENT_CHARS, sum(file.size for _, file in source_files) // MIN_DOCUMENTS))


def _iter_documents(
    source_files: SourceFiles, skipped: SkippedDocuments, progress: ProgressFn | None
) -> Iterator[Document]:
    done, total, told = 0, sum(file.size for _, file in source_files), 0
    longest = max_document_chars(source_files)
    for source, file in source_files:
        within = 0
        for document in read_file(file, source, skipped, longest):
            within = min(file.size, within + len(document.text) + len(document.target or ""))
            if progress is not None and (done + within - told) * 1000 >= total:  # not for each of millions
                told = done + within
                progress(told, total)
            yield document
        done += file.size
    if progress is not None:
        progress(total, total)


def is_validation_document(split_key: bytes, seed: int, validation_split: float) -> bool:
    """Whether a document is kept for looking at: a matter of its content or group, whichever others there are."""
    drawn = sha256(f"{seed}:".encode() + split_key).digest()[:8]
    return int.from_bytes(drawn, "big") < int(validation_split * 2**64)


def _check_split_sizes(prepared: PreparedData, validation_split: float) -> None:
    count = prepared.train.num_documents + prepared.validation.num_documents
    if not count:
        why = f"all were passed over: {prepared.skipped}" if prepared.skipped.total else "there are none"
        raise InputError(f"the data has no documents ({why}); give sources with text")
    if not prepared.train.num_documents or (validation_split and not prepared.validation.num_documents):
        part = "validation" if prepared.train.num_documents else "training"
        raise InputError(
            f"of {count} documents none fell to {part}, with a share of {validation_split} for validation; give more"
            " documents (JSON lines hold many), change validation_split, or take another seed"
        )


def _remove_stale_directories(directory: Path) -> None:
    """Half-written folders of processes that were killed: nothing in them has changed for long."""
    for half in directory.glob(".tmp-*"):
        try:
            newest = max(path.stat().st_mtime for path in [half, *half.iterdir()])
        except OSError:  # its process has just finished or removed it
            continue
        if newest < time.time() - STALE_SECONDS:
            shutil.rmtree(half, ignore_errors=True)


def _current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
