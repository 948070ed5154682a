"""The checkpoints of a run: each is put in place whole or not at all, and old ones go only when new ones are there.

What is being written or removed has a hidden name until then, so that a process killed at any instant leaves whole
checkpoints, and beside them at most what is known to be none.
"""

import math
import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as parsed
from safetensors.torch import save as serialised
from torch import Tensor

from cutaway.errors import CutawayError, InputError
from cutaway.train.failpoints import reach
from cutaway.train.folders import (
    HIDDEN,
    REMOVED,
    REPLACED,
    SAVING,
    aside,
    hidden,
    listing,
    put,
    remove,
    sync,
    write_file,
)
from cutaway.train.saved import (
    MANIFEST,
    STATE,
    Listed,
    Manifest,
    Saved,
    digest,
    encoded,
    manifest_of,
    misfits,
    name_of,
    read,
)

SHARD = 1 << 30
"""Bytes of tensors in one file, at most, unless one tensor has more: what is held a second time while it is written."""

Tensors = Mapping[str, Mapping[str, Tensor]]
Copied = Callable[[Tensor], Tensor]


class SaveError(CutawayError):
    """A checkpoint could not be written; those before it are as they were, and a run can go on."""


class Store:
    """The checkpoints in a directory: the newest few, and the best."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep is {keep!r}, and one checkpoint is the least to go on from; give 1 or more")
        self.directory, self.keep = Path(directory), keep
        self._damaged: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        best: float | None = None,
        copied: Copied | None = None,
    ) -> Path:
        """Write a checkpoint; it is on the disk when this returns. The one with the lowest `best`, a loss, is kept.

        `copied` gives a tensor's values on the CPU; it is called for each, group by group, in the order of names.
        """
        text = _checked(step, tensors, state)
        self._join()
        return self._write(step, tensors, text, best, copied or _copied)

    def save_soon(self, step: int, tensors: Tensors, state: Mapping[str, Any], *, best: float | None = None) -> None:
        """Copy everything now and write it meanwhile. What went wrong with the one before is raised then."""
        text = _checked(step, tensors, state)
        self._join()
        copies = {group: {name: _copied(each) for name, each in part.items()} for group, part in tensors.items()}
        before, self._error = self._error, None

        def write() -> None:
            try:
                self._write(step, copies, text, best, lambda tensor: tensor)
            except BaseException as error:  # of whatever kind: it is raised again where somebody listens
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()
        if before is not None:
            raise before

    def wait(self) -> None:
        """Until nothing is being written; what went wrong is raised."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def newest(self, *, report: Callable[[str], None]) -> Saved | None:
        """The newest checkpoint that is what was once written, or None if there are none; damaged ones are reported."""
        self._join()
        wrong = []
        try:
            for trouble in self._sweep():
                report(trouble)
            for folder in self._folders():
                found = read(folder)
                if isinstance(found, Saved):
                    return found
                if not folder.exists():  # a run that saves meanwhile has removed it: it has newer ones
                    return self.newest(report=report)
                self._damaged.add(folder)
                wrong.append(f"{folder.name}: {found}")
                report(f"checkpoint {wrong[-1]}; it is not used")
        except OSError as error:
            raise InputError(f"'{self.directory}' cannot be read: {error}; restore it, or name another") from None
        if wrong:
            raise InputError(
                f"no checkpoint in '{self.directory}' is whole ({' | '.join(wrong)}); restore one, or begin a new run"
            )
        return None

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, tensors: Tensors, state: bytes, best: float | None, copied: Copied) -> Path:
        target = self.directory / name_of(step)
        reach("before save")
        try:
            if not self.directory.exists():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync(self.directory.parent)
            troubles = self._sweep()
            with aside(target) as work:
                self._fill(work, step, tensors, state, best, copied)
                reach("before rename")
                old = put(work, target)
                reach("after rename")
                sync(self.directory)
        except OSError as error:
            raise SaveError(
                f"'{target}' was not saved: {error.strerror or error}; make room, or name another directory, and save"
                " again"
            ) from error
        self._damaged.discard(target)
        try:
            troubles += [] if old is None else remove(old)
            troubles += self._prune()
        except OSError as error:
            troubles.append(f"older ones could not be removed ({error})")
        if troubles:
            raise SaveError(f"'{target}' is saved, but {'; '.join(troubles)}; remove by hand what is not needed")
        return target

    def _fill(self, work: Path, step: int, tensors: Tensors, state: bytes, best: float | None, copied: Copied) -> None:
        """Every file of a checkpoint, the manifest last."""
        files: dict[str, Listed] = {}

        def add(name: str, data: bytes, group: str | None = None) -> None:
            write_file(work / name, data)
            files[name] = Listed(size=len(data), sha256=digest(data), group=group)
            reach("after file")

        for group, part in sorted(tensors.items()):
            pieces = _pieces(part)
            for n, names in enumerate(pieces, 1):
                file = f"{group}.safetensors" if len(pieces) == 1 else f"{group}-{n:05d}.safetensors"
                add(file, serialised({name: copied(part[name]) for name in names}), group)
        add(STATE, state)
        reach("before manifest")
        known = [manifest_of(folder) for folder in self._folders()]
        serial = 1 + max((each.serial for each in known if isinstance(each, Manifest)), default=0)
        rated = float(best) if best is not None and math.isfinite(best) else None  # what is no number is never the best
        write_file(work / MANIFEST, Manifest(step=step, serial=serial, best=rated, files=files).sealed())
        sync(work)

    def _folders(self) -> list[Path]:
        """The checkpoints' folders, the last written first; before them those that do not say when that was."""
        found = {}
        for path in listing(self.directory):
            if _is_ours(path.name) and path.is_dir():
                manifest = manifest_of(path)
                found[path] = (manifest.serial if isinstance(manifest, Manifest) else math.inf, int(path.name[5:]))
        return sorted(found, key=found.__getitem__, reverse=True)

    def _sweep(self) -> list[str]:
        """Remove what killed saves have left, or put it in place if it was whole; says what could not be removed."""
        left = [(found, path) for path in listing(self.directory) if (found := HIDDEN.fullmatch(path.name))]
        troubles = []
        for kind in (SAVING, REPLACED, REMOVED):  # where one was to replace another, the new one comes first
            for found, path in left:
                if found["kind"] == kind and _is_ours(found["name"]) and path.is_dir():
                    troubles += remove(path) if kind == REMOVED else remove(path, rescue=_rescued)
        return troubles

    def _prune(self) -> list[str]:
        """Keep the newest and the best. Damaged ones do not count, and are left for their owner to look at."""
        known = {path: found for path in self._folders() if isinstance(found := manifest_of(path), Manifest)}
        whole = {path: manifest for path, manifest in known.items() if path not in self._damaged}
        stay = set(list(whole)[: self.keep])
        # Of equals the oldest: whoever gives the lowest loss so far, again and again, means the one that had it first.
        rated = [(each.best, each.serial, path) for path, each in whole.items() if each.best is not None]
        stay |= {min(rated)[2]} if rated else set()
        troubles = []
        for path, manifest in whole.items():
            strange = {each.name for each in path.iterdir()} - manifest.files.keys() - {MANIFEST}
            if path not in stay and not strange:  # what somebody put there is not ours to remove
                going = hidden(path, REMOVED)
                path.rename(going)
                reach("before removing")
                troubles += remove(going)
                reach("after prune")
        return troubles


def _is_ours(name: str) -> bool:
    return re.fullmatch(r"step-[0-9]{9,}", name) is not None and name == name_of(int(name[5:]))


def _rescued(path: Path) -> bool:
    """Put a hidden folder in place if it is whole and nothing has its name: its save was killed just before it did."""
    found = HIDDEN.fullmatch(path.name)
    assert found is not None
    target = path.with_name(found["name"])
    manifest = manifest_of(path, target.name)
    if target.exists() or isinstance(manifest, str) or misfits(path, manifest):
        return False
    path.rename(target)
    sync(target.parent)
    return True


def _checked(step: int, tensors: Tensors, state: Mapping[str, Any]) -> bytes:
    """The state as it is written, once all is known to be such as can be read again."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"step is {step!r}; give a whole number, 0 or more")
    for group, part in tensors.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", group):
            raise InputError(f"{group!r} names no group of tensors, since a file is named so; use a-z, 0-9 and _")
        for name, tensor in part.items():
            if (
                tensor.layout != torch.strided
                or tensor.is_meta
                or name == "__metadata__"
                or not _can_hold(tensor.dtype)
            ):
                kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
                raise InputError(
                    f"{group}'s tensor '{name}' ({kind}) has no place in safetensors; convert or rename it"
                )
    return encoded(state)


@cache
def _can_hold(dtype: torch.dtype) -> bool:
    try:
        return parsed(serialised({"": torch.empty(0, dtype=dtype)}))[""].dtype == dtype
    except (KeyError, RuntimeError):  # some can be written only, and some not even that
        return False


def _copied(tensor: Tensor) -> Tensor:
    """Memory of its own on the CPU, in order."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _pieces(part: Mapping[str, Tensor]) -> list[list[str]]:
    """The names that go into each file; one file at least, so that a group without tensors comes back too."""
    pieces: list[list[str]] = [[]]
    filled = 0
    for name, tensor in sorted(part.items()):
        size = tensor.numel() * tensor.element_size()
        if pieces[-1] and filled + size > SHARD:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces
