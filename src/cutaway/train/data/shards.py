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
from cutaway.text import Tokenizer
from cutaway.train.data.arrays import Split, Writer
from cutaway.train.data.documents import LONGEST, Document, Troubles, read_file
from cutaway.train.data.sources import File, Source, files
from cutaway.train.data.tokenise import chunks, cores, encode_all

FORMAT = 1
"""To be raised whenever the same sources would be read, tokenised or split in another way."""
MUCH = 1 << 26
"""Bytes of files from which on starting processes pays."""
FEW, SHORTEST = 64, 256
"""Fewer files of text than this are cut into about so many documents, of at least so many characters."""
FORSAKEN = 3600
"""Seconds after which a half-written folder that nobody writes to is one of a process that was killed."""
Progress = Callable[[int, int], None]
Listed = list[tuple[Source, File]]


@dataclass(frozen=True)
class Prepared:
    """Documents as ids, in memory maps."""

    train: Split
    validation: Split
    fingerprint: str
    """sha256 over the documents' contents and what the tokenizer made of them: equal data has equal ones, wherever it
    lies, and with a tokenizer that was saved and loaded since."""
    troubles: Troubles
    folder: Path

    @property
    def bytes(self) -> dict[str, int]:
        """UTF-8 bytes, for bits per byte."""
        return {"train": self.train.bytes, "validation": self.validation.bytes}


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    directory: str | os.PathLike[str],
    *,
    validation: float,
    seed: int,
    progress: Progress | None = None,
) -> Prepared:
    """The sources' documents, one source after the other, as ids in a folder of `directory`.

    Weights have no say here: sources that are read more often than others are prepared each by itself and mixed.
    Nothing is read again while names, sizes and times of the files are the same; `progress` is told bytes done and all.
    """
    if not 0 <= validation < 1:
        raise InputError(f"validation is {validation}; give a share of the documents from 0 up to, but not, 1")
    if len({source.target is None for source in sources}) > 1:
        raise InputError("some sources have a target and some have none; give each one, or prepare them apart")
    listed = _listed(sources)
    directory = Path(directory)
    folder = directory / _key(listed, tokenizer, validation, seed)
    found = opened(folder)
    if found is None:
        try:
            _build(sources, listed, tokenizer, folder, validation, seed, progress)
        except OSError as error:
            raise InputError(
                f"the data cannot be written to '{directory}' ({error.strerror or error}); make room, or name another"
            ) from error
        found = opened(folder)
    if found is None:
        raise InputError(f"'{folder}' was damaged as soon as it was written; check the disk, or name another directory")
    return found


def opened(folder: Path) -> Prepared | None:
    """What was prepared earlier, or None where nothing is, or nothing whole."""
    try:
        about: dict[str, Any] = json.loads((folder / "data.json").read_text(encoding="utf-8"))
        parts = [Split.open(folder, name, about[name], about["pairs"]) for name in ("train", "validation")]
        return Prepared(parts[0], parts[1], str(about["fingerprint"]), Troubles(**about["troubles"]), folder)
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _listed(sources: Sequence[Source]) -> Listed:
    return [(source, file) for source in sources for file in files(source)]


def _key(listed: Listed, tokenizer: Tokenizer, validation: float, seed: int) -> str:
    """Names everything that the folder's content follows from; for files, what tells that one was changed."""
    backend = tokenizer.backend
    name = sha256(f"{FORMAT} {validation!r} {seed} {backend.encode_special_tokens}".encode())
    name.update(json.dumps([type(tokenizer).__name__, sorted(tokenizer.named.items()), backend.to_str()]).encode())
    for source, file in listed:
        row = [str(file.path.absolute()), file.name, file.size, file.modified]
        row += [source.field, source.target, source.group]
        name.update(json.dumps(row).encode() + b"\n")
    return name.hexdigest()[:32]


def _build(
    sources: Sequence[Source],
    listed: Listed,
    tokenizer: Tokenizer,
    folder: Path,
    validation: float,
    seed: int,
    progress: Progress | None,
) -> None:
    """Everything is written aside, and gets its name when it is on the disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    aside = Path(tempfile.mkdtemp(prefix=".half-", dir=folder.parent))
    try:
        _write(listed, tokenizer, aside, validation, seed, progress)
        if _listed(sources) != listed:
            raise InputError("files changed while they were read; run it again when nothing writes to them")
        if (made := opened(aside)) is not None:
            _check(made, validation)
        aside.chmod(0o777 & ~_umask())
        if folder.exists() and opened(folder) is None:
            shutil.rmtree(folder)
        try:
            aside.rename(folder)
        except OSError:
            if opened(folder) is None:  # otherwise another process has made the same meanwhile
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(
    listed: Listed, tokenizer: Tokenizer, aside: Path, validation: float, seed: int, progress: Progress | None
) -> None:
    # Apart, so that it does not matter how many documents were encoded together.
    troubles, contents, lengths, ids = Troubles(), sha256(), sha256(), sha256()
    pairs = any(source.target is not None for source, _ in listed)
    largest = max([tokenizer.vocab_size - 1, *tokenizer.special_ids, *tokenizer.backend.get_vocab().values()])
    workers = min(cores(), 32) if sum(file.size for _, file in listed) >= MUCH else 1
    documents = _documents(listed, troubles, progress)
    with Writer(aside, "train", largest, pairs) as train, Writer(aside, "validation", largest, pairs) as kept:
        for encoded in encode_all(chunks(documents), tokenizer, workers):
            some = encoded.lengths[:, : 2 if pairs else 1].min(1) > 0
            for _ in np.flatnonzero(~some):
                troubles.add("no tokens", "a text that the tokenizer makes nothing of")
            held = np.array([held_out(side, seed, validation) for side in encoded.sides], bool)
            train.add(encoded, some & ~held)
            kept.add(encoded, some & held)
            contents.update(b"".join(encoded.digests))
            lengths.update(encoded.lengths.astype("<i8").tobytes())
            ids.update(encoded.ids.astype("<u4").tobytes())
        fingerprint = sha256(contents.digest() + lengths.digest() + ids.digest()).hexdigest()
        about = {"format": FORMAT, "fingerprint": fingerprint, "pairs": pairs, "troubles": asdict(troubles)}
        about |= {"train": train.finish(), "validation": kept.finish(), "files": len(listed)}
    with (aside / "data.json").open("w", encoding="utf-8") as file:
        json.dump(about, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def longest_of(listed: Listed) -> int:
    """How long a document may be: a few files of text are cut, so that some of it can be kept for looking at."""
    if len(listed) >= FEW or any(file.path.suffix in (".jsonl", ".parquet", ".tsv") for _, file in listed):
        return LONGEST
    return min(LONGEST, max(SHORTEST, sum(file.size for _, file in listed) // FEW))


def _documents(listed: Listed, troubles: Troubles, progress: Progress | None) -> Iterator[Document]:
    done, total, told = 0, sum(file.size for _, file in listed), 0
    longest = longest_of(listed)
    for source, file in listed:
        within = 0
        for document in read_file(file, source, troubles, longest):
            within = min(file.size, within + len(document.text) + len(document.target or ""))
            if progress is not None and (done + within - told) * 1000 >= total:  # not for each of millions
                told = done + within
                progress(told, total)
            yield document
        done += file.size
    if progress is not None:
        progress(total, total)


def held_out(digest: bytes, seed: int, share: float) -> bool:
    """Whether a document is kept for looking at: a matter of its content or group, whichever others there are."""
    drawn = sha256(f"{seed}:".encode() + digest).digest()[:8]
    return int.from_bytes(drawn, "big") < int(share * 2**64)


def _check(found: Prepared, validation: float) -> None:
    count = found.train.documents + found.validation.documents
    if not count:
        why = f"all were passed over: {found.troubles}" if found.troubles.total else "there are none"
        raise InputError(f"the data has no documents ({why}); give sources with text")
    if not found.train.documents or (validation and not found.validation.documents):
        part = "validation" if found.train.documents else "training"
        raise InputError(
            f"of {count} documents none fell to {part}, with a share of {validation} for validation; give more"
            " documents (JSON lines hold many), change validation, or take another seed"
        )


def _sweep(directory: Path) -> None:
    """Half-written folders of processes that were killed: nothing in them has changed for long."""
    for half in directory.glob(".half-*"):
        try:
            newest = max(path.stat().st_mtime for path in [half, *half.iterdir()])
        except OSError:  # its process has just finished or removed it
            continue
        if newest < time.time() - FORSAKEN:
            shutil.rmtree(half, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(directory: Path) -> None:
    if os.name != "posix":  # elsewhere a directory cannot be opened
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
