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
from safetensors.torch import load as parse_safetensors
from safetensors.torch import save as serialize_safetensors
from torch import Tensor

from cutaway.errors import CutawayError, InputError
from cutaway.model import Transformer
from cutaway.train.checkpoint.atomic_directory import (
    HIDDEN_NAME_PATTERN,
    REMOVED,
    REPLACED,
    SAVING,
    fsync_directory,
    hidden_path,
    list_directory,
    remove_hidden_directory,
    rename_into_place,
    temporary_directory,
    write_file,
)
from cutaway.train.checkpoint.failpoints import hit_failpoint
from cutaway.train.checkpoint.manifest import (
    MANIFEST_FILE,
    STATE_FILE,
    LoadedCheckpoint,
    Manifest,
    ManifestEntry,
    checkpoint_name,
    encode_state,
    find_mismatched_files,
    read_checkpoint,
    read_manifest,
    sha256_hex,
)
from cutaway.train.distributed.dtensor import TensorGatherer, TensorGroups, copy_from_full, is_dtensor
from cutaway.train.distributed.process_group import DistributedContext

MAX_FILE_BYTES = 1 << 30
"""Bytes of tensors in one file, at most, unless one tensor has more: what is held a second time while it is written."""


CopyFn = Callable[[Tensor], Tensor]


class CheckpointWriteError(CutawayError):
    """A checkpoint could not be written; those before it are as they were, and a run can go on."""


class CheckpointManager:
    """The checkpoints in a directory: the newest few, and the best."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InputError(f"keep is {keep!r}, and one checkpoint is the least to go on from; give 1 or more")
        self.directory, self.keep = Path(directory), keep
        self._damaged: set[Path] = set()
        self._writer_thread: threading.Thread | None = None
        self._writer_error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: TensorGroups,
        state: Mapping[str, Any],
        *,
        best_eval_loss: float | None = None,
        copy_to_cpu: CopyFn | None = None,
    ) -> Path:
        """Write a checkpoint; it is on the disk when this returns. The one with the lowest `best_eval_loss` is kept.

        `copy_to_cpu` gives a tensor's values on the CPU; it is called for each, group by group, in the order of names.
        """
        text = _encode_checked_state(step, tensors, state)
        self._join_writer()
        return self._write_checkpoint(step, tensors, text, best_eval_loss, copy_to_cpu or _copy_to_cpu)

    def async_save(
        self, step: int, tensors: TensorGroups, state: Mapping[str, Any], *, best_eval_loss: float | None = None
    ) -> None:
        """Copy everything now and write it meanwhile. What went wrong with the one before is raised then."""
        text = _encode_checked_state(step, tensors, state)
        self._join_writer()
        copies = {group: {name: _copy_to_cpu(each) for name, each in part.items()} for group, part in tensors.items()}
        before, self._writer_error = self._writer_error, None

        def write() -> None:
            try:
                self._write_checkpoint(step, copies, text, best_eval_loss, lambda tensor: tensor)
            except BaseException as error:  # of whatever kind: it is raised again where somebody listens
                self._writer_error = error

        self._writer_thread = threading.Thread(target=write, name="checkpoint")
        self._writer_thread.start()
        if before is not None:
            raise before

    def wait_for_async_save(self) -> None:
        """Until nothing is being written; what went wrong is raised."""
        self._join_writer()
        error, self._writer_error = self._writer_error, None
        if error is not None:
            raise error

    def load_latest(self, *, log: Callable[[str], None]) -> LoadedCheckpoint | None:
        """The newest checkpoint that is what was once written, or None if there are none; damaged ones are reported."""
        self._join_writer()
        wrong = []
        try:
            for trouble in self._remove_partial_saves():
                log(trouble)
            for folder in self._list_checkpoints():
                found = read_checkpoint(folder)
                if isinstance(found, LoadedCheckpoint):
                    return found
                if not folder.exists():  # a run that saves meanwhile has removed it: it has newer ones
                    return self.load_latest(log=log)
                self._damaged.add(folder)
                wrong.append(f"{folder.name}: {found}")
                log(f"checkpoint {wrong[-1]}; it is not used")
        except OSError as error:
            raise InputError(f"'{self.directory}' cannot be read: {error}; restore it, or name another") from None
        if wrong:
            raise InputError(
                f"no checkpoint in '{self.directory}' is whole ({' | '.join(wrong)}); restore one, or begin a new run"
            )
        return None

    def _join_writer(self) -> None:
        if self._writer_thread is not None:
            self._writer_thread.join()
            self._writer_thread = None

    def _write_checkpoint(
        self, step: int, tensors: TensorGroups, state: bytes, best_eval_loss: float | None, copy_to_cpu: CopyFn
    ) -> Path:
        target = self.directory / checkpoint_name(step)
        hit_failpoint("before-save")
        try:
            if not self.directory.exists():
                self.directory.mkdir(parents=True, exist_ok=True)
                fsync_directory(self.directory.parent)
            troubles = self._remove_partial_saves()
            with temporary_directory(target) as work:
                self._write_files(work, step, tensors, state, best_eval_loss, copy_to_cpu)
                hit_failpoint("before-rename")
                old = rename_into_place(work, target)
                hit_failpoint("after-rename")
                fsync_directory(self.directory)
        except OSError as error:
            raise CheckpointWriteError(
                f"'{target}' was not saved: {error.strerror or error}; make room, or name another directory, and save"
                " again"
            ) from error
        self._damaged.discard(target)
        try:
            troubles += [] if old is None else remove_hidden_directory(old)
            troubles += self._prune()
        except OSError as error:
            troubles.append(f"older ones could not be removed ({error})")
        if troubles:
            raise CheckpointWriteError(
                f"'{target}' is saved, but {'; '.join(troubles)}; remove by hand what is not needed"
            )
        return target

    def _write_files(
        self,
        temporary: Path,
        step: int,
        tensors: TensorGroups,
        state: bytes,
        best_eval_loss: float | None,
        copy_to_cpu: CopyFn,
    ) -> None:
        """Every file of a checkpoint, the manifest last."""
        files: dict[str, ManifestEntry] = {}

        def add(name: str, data: bytes, group: str | None = None) -> None:
            write_file(temporary / name, data)
            files[name] = ManifestEntry(size=len(data), sha256=sha256_hex(data), group=group)
            hit_failpoint("after-file-write")

        for group, part in sorted(tensors.items()):
            pieces = _split_into_files(part)
            for n, names in enumerate(pieces, 1):
                file = f"{group}.safetensors" if len(pieces) == 1 else f"{group}-{n:05d}.safetensors"
                add(file, serialize_safetensors({name: copy_to_cpu(part[name]) for name in names}), group)
        add(STATE_FILE, state)
        hit_failpoint("before-manifest")
        known = [read_manifest(folder) for folder in self._list_checkpoints()]
        serial = 1 + max((each.serial for each in known if isinstance(each, Manifest)), default=0)
        # What is no number is never the best.
        rated = float(best_eval_loss) if best_eval_loss is not None and math.isfinite(best_eval_loss) else None
        write_file(
            temporary / MANIFEST_FILE, Manifest(step=step, serial=serial, best_eval_loss=rated, files=files).to_bytes()
        )
        fsync_directory(temporary)

    def _list_checkpoints(self) -> list[Path]:
        """The checkpoints' folders, the last written first; before them those that do not say when that was."""
        found = {}
        for path in list_directory(self.directory):
            if _is_checkpoint_name(path.name) and path.is_dir():
                manifest = read_manifest(path)
                found[path] = (manifest.serial if isinstance(manifest, Manifest) else math.inf, int(path.name[5:]))
        return sorted(found, key=found.__getitem__, reverse=True)

    def _remove_partial_saves(self) -> list[str]:
        """Remove what killed saves have left, or put it in place if it was whole; says what could not be removed."""
        left = [
            (found, path)
            for path in list_directory(self.directory)
            if (found := HIDDEN_NAME_PATTERN.fullmatch(path.name))
        ]
        troubles = []
        for kind in (SAVING, REPLACED, REMOVED):  # where one was to replace another, the new one comes first
            for found, path in left:
                if found["kind"] == kind and _is_checkpoint_name(found["name"]) and path.is_dir():
                    troubles += (
                        remove_hidden_directory(path)
                        if kind == REMOVED
                        else remove_hidden_directory(path, recover=_recover_partial_save)
                    )
        return troubles

    def _prune(self) -> list[str]:
        """Keep the newest and the best. Damaged ones do not count, and are left for their owner to look at."""
        known = {path: found for path in self._list_checkpoints() if isinstance(found := read_manifest(path), Manifest)}
        whole = {path: manifest for path, manifest in known.items() if path not in self._damaged}
        stay = set(list(whole)[: self.keep])
        # Of equals the oldest: whoever gives the lowest loss so far, again and again, means the one that had it first.
        rated = [
            (each.best_eval_loss, each.serial, path) for path, each in whole.items() if each.best_eval_loss is not None
        ]
        stay |= {min(rated)[2]} if rated else set()
        troubles = []
        for path, manifest in whole.items():
            strange = {each.name for each in path.iterdir()} - manifest.files.keys() - {MANIFEST_FILE}
            if path not in stay and not strange:  # what somebody put there is not ours to remove
                going = hidden_path(path, REMOVED)
                path.rename(going)
                hit_failpoint("before-remove")
                troubles += remove_hidden_directory(going)
                hit_failpoint("after-prune")
        return troubles


def _is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"step-[0-9]{9,}", name) is not None and name == checkpoint_name(int(name[5:]))


def _recover_partial_save(path: Path) -> bool:
    """Put a hidden folder in place if it is whole and nothing has its name: its save was killed just before it did."""
    found = HIDDEN_NAME_PATTERN.fullmatch(path.name)
    assert found is not None
    target = path.with_name(found["name"])
    manifest = read_manifest(path, target.name)
    if target.exists() or isinstance(manifest, str) or find_mismatched_files(path, manifest):
        return False
    path.rename(target)
    fsync_directory(target.parent)
    return True


def _encode_checked_state(step: int, tensors: TensorGroups, state: Mapping[str, Any]) -> bytes:
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
                or not _is_safetensors_dtype(tensor.dtype)
            ):
                kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
                raise InputError(
                    f"{group}'s tensor '{name}' ({kind}) has no place in safetensors; convert or rename it"
                )
    return encode_state(state)


@cache
def _is_safetensors_dtype(dtype: torch.dtype) -> bool:
    try:
        return parse_safetensors(serialize_safetensors({"": torch.empty(0, dtype=dtype)}))[""].dtype == dtype
    except (KeyError, RuntimeError):  # some can be written only, and some not even that
        return False


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Memory of its own on the CPU, in order."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _split_into_files(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names that go into each file; one file at least, so that a group without tensors comes back too."""
    pieces: list[list[str]] = [[]]
    filled = 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * tensor.element_size()
        if pieces[-1] and filled + size > MAX_FILE_BYTES:
            pieces.append([])
            filled = 0
        pieces[-1].append(name)
        filled += size
    return pieces


def save_state(
    manager: CheckpointManager,
    dist_context: DistributedContext,
    step: int,
    tensors: TensorGroups,
    state: Mapping[str, Any],
    *,
    best_eval_loss: float | None,
) -> None:
    """The leader writes: meanwhile, where it has all of the state; or tensor by tensor, as others bring their parts."""
    if dist_context.mesh is None:
        if dist_context.is_main_process:
            manager.async_save(step, tensors, state, best_eval_loss=best_eval_loss)
        return
    gathering = TensorGatherer(tensors)
    try:
        if dist_context.is_main_process:
            manager.save(step, tensors, state, best_eval_loss=best_eval_loss, copy_to_cpu=gathering.gather_next_to_cpu)
    finally:
        gathering.gather_remaining()  # a disk may be full; the others do not know, and go on asking


def load_latest_state(
    manager: CheckpointManager, dist_context: DistributedContext, log: Callable[[str], None]
) -> LoadedCheckpoint | None:
    """The checkpoint that the leader finds, read by every rank."""
    found = manager.load_latest(log=log) if dist_context.is_main_process else None
    step = dist_context.broadcast_int(-1 if found is None else found.step)
    if step < 0 or found is not None:
        return found
    seen = read_checkpoint(manager.directory / checkpoint_name(step))
    if isinstance(seen, str):
        raise InputError(
            f"process {dist_context.rank} cannot read {checkpoint_name(step)} ({seen}); every process must see the"
            " run's directory"
        )
    return seen


def load_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Take these weights, of which each rank may have a part."""
    mine = model.state_dict()
    if not any(is_dtensor(tensor) for tensor in mine.values()):
        model.load_state_dict(dict(weights))
        return
    if mine.keys() != weights.keys():
        raise InputError("this checkpoint is of another model; resume a run with its own")
    for name, tensor in mine.items():
        copy_from_full(tensor, weights[name])
