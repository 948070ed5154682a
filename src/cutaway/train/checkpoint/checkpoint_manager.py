"""CheckpointManager: save, load and prune the checkpoints of a run. The state may be sharded over ranks.

A directory has a hidden name while it is written or removed. So if a process is killed at any instant, every visible
checkpoint is complete, and partial checkpoints are recognized by their names.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from safetensors.torch import save as serialize_safetensors
from torch import Tensor

from cutaway.errors import CutawayError, InputError
from cutaway.model import Transformer
from cutaway.model.adapters.adapter_methods import adapter_state_dict
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
    TrainerState,
    checkpoint_name,
    find_mismatched_files,
    is_checkpoint_name,
    list_checkpoints,
    read_checkpoint,
    read_manifest,
    sha256_hex,
)
from cutaway.train.distributed.dtensor import TensorGatherer, TensorGroups, copy_from_full, copy_to_cpu, is_dtensor
from cutaway.train.distributed.process_group import DistributedContext

MAX_FILE_BYTES = 1 << 30
"""Maximum number of bytes of tensors per file, unless a single tensor is larger. It limits the memory for saving,
because all tensors of a file are copied when it is written."""


CopyFn = Callable[[Tensor], Tensor]


class CheckpointWriteError(CutawayError):
    """A checkpoint could not be written, or it was written but old directories could not be removed.

    Training can continue. If the checkpoint could not be written, earlier checkpoints are unchanged.
    """


class CheckpointManager:
    """Checkpoints in a directory. The newest `keep` and the one with the lowest evaluation loss are kept."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self.directory, self.keep = directory, keep
        self._damaged: set[Path] = set()
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending_saves: list[Future[Path]] = []
        """The last asynchronous save, until its error is raised or it is known to have succeeded."""

    def save(self, tensors: TensorGroups, state: TrainerState, copy_to_cpu: CopyFn = copy_to_cpu) -> Path:
        """Write a checkpoint, flush it to disk, and return its directory.

        `copy_to_cpu` copies a tensor to the CPU. It is called once per tensor, in order of group and name.
        """
        wait(self._pending_saves)
        return self._write_checkpoint(tensors, state, copy_to_cpu)

    def async_save(self, tensors: TensorGroups, state: TrainerState) -> None:
        """Copy the tensors to the CPU and write them in a thread. If the previous save failed, raise its error."""
        wait(self._pending_saves)  # before copying, so that there is one copy in memory at a time
        copies = {group: {name: copy_to_cpu(each) for name, each in named.items()} for group, named in tensors.items()}
        previous = self._pending_saves
        self._pending_saves = [self._executor.submit(self._write_checkpoint, copies, state, lambda tensor: tensor)]
        for save in previous:
            save.result()

    def wait_for_async_save(self) -> None:
        """Wait until the asynchronous save is finished. If the save failed, raise its error."""
        previous, self._pending_saves = self._pending_saves, []
        for save in previous:
            save.result()

    def load_latest(self, *, log: Callable[[str], None]) -> LoadedCheckpoint | None:
        """Load the newest valid checkpoint. None if there is no checkpoint. Damaged ones are logged and skipped.

        Raises InputError if all checkpoints are damaged.
        """
        wait(self._pending_saves)
        problems = []
        try:
            for message in self._remove_partial_saves():
                log(message)
            for path in list_checkpoints(self.directory):
                loaded = read_checkpoint(path)
                if isinstance(loaded, LoadedCheckpoint):
                    return loaded
                if not path.exists():  # another process has just removed it, after saving a newer one
                    return self.load_latest(log=log)
                self._damaged.add(path)
                problems.append(f"{path.name}: {loaded}")
                log(f"checkpoint {problems[-1]}; it is skipped")
        except OSError as error:
            raise InputError(f"cannot read '{self.directory}': {error}; restore it, or pass another run") from None
        if problems:
            raise InputError(
                f"no checkpoint in '{self.directory}' is valid ({' | '.join(problems)}); restore one, or start a new"
                " run"
            )
        return None

    def _write_checkpoint(self, tensors: TensorGroups, state: TrainerState, copy_to_cpu: CopyFn) -> Path:
        target = self.directory / checkpoint_name(state.step)
        hit_failpoint("before-save")
        try:
            if not self.directory.exists():
                self.directory.mkdir(parents=True, exist_ok=True)
                fsync_directory(self.directory.parent)
            problems = self._remove_partial_saves()
            with temporary_directory(target) as temporary:
                self._write_files(temporary, tensors, state, copy_to_cpu)
                hit_failpoint("before-rename")
                replaced = rename_into_place(temporary, target)
                hit_failpoint("after-rename")
                fsync_directory(self.directory)
        except OSError as error:
            raise CheckpointWriteError(
                f"could not save '{target}': {error.strerror or error}. Earlier checkpoints are kept; free disk space,"
                " or use another directory"
            ) from error
        self._damaged.discard(target)
        try:
            problems += [] if replaced is None else remove_hidden_directory(replaced)
            problems += self._prune()
        except OSError as error:
            problems.append(f"could not remove older checkpoints ({error})")
        if problems:
            raise CheckpointWriteError(f"saved '{target}', but {'; '.join(problems)}; remove these directories by hand")
        return target

    def _write_files(self, temporary: Path, tensors: TensorGroups, state: TrainerState, copy_to_cpu: CopyFn) -> None:
        """Write the files of a checkpoint. The manifest is written last."""
        files: dict[str, ManifestEntry] = {}

        def write(name: str, data: bytes, group: str | None = None) -> None:
            write_file(temporary / name, data)
            files[name] = ManifestEntry(size=len(data), sha256=sha256_hex(data), group=group)
            hit_failpoint("after-file-write")

        for group, by_name in sorted(tensors.items()):
            files_of_group = _split_into_files(by_name)
            for number, names in enumerate(files_of_group, 1):
                file = f"{group}.safetensors" if len(files_of_group) == 1 else f"{group}-{number:05d}.safetensors"
                write(file, serialize_safetensors({name: copy_to_cpu(by_name[name]) for name in names}), group)
        write(STATE_FILE, state.model_dump_json(indent=1).encode())
        hit_failpoint("before-manifest")
        manifests = [read_manifest(path) for path in list_checkpoints(self.directory)]
        serial = 1 + max((each.serial for each in manifests if isinstance(each, Manifest)), default=0)
        best = state.best_eval_loss
        best = best if best is not None and math.isfinite(best) else None  # a NaN or infinite loss is never the best
        manifest = Manifest(step=state.step, serial=serial, best_eval_loss=best, files=files)
        write_file(temporary / MANIFEST_FILE, manifest.to_bytes())
        fsync_directory(temporary)

    def _remove_partial_saves(self) -> list[str]:
        """Remove the directories left by killed saves, or rename those that are complete. Return error messages."""
        paths = list_directory(self.directory)
        problems = []
        for kind in (SAVING, REPLACED, REMOVED):  # first the new checkpoint, then the one it replaces
            for path in paths:
                match = HIDDEN_NAME_PATTERN.fullmatch(path.name)
                if match and match["kind"] == kind and is_checkpoint_name(match["name"]) and path.is_dir():
                    problems += remove_hidden_directory(path, None if kind == REMOVED else _recover_partial_save)
        return problems

    def _prune(self) -> list[str]:
        """Remove all checkpoints except the newest `keep` and the one with the lowest evaluation loss.

        Damaged checkpoints are neither counted nor removed. Checkpoints with files that a user added are not removed.
        Returns error messages.
        """
        manifests = {
            path: read_manifest(path) for path in list_checkpoints(self.directory) if path not in self._damaged
        }
        valid = {path: each for path, each in manifests.items() if isinstance(each, Manifest)}
        kept = set(list(valid)[: self.keep])
        # Every save stores the lowest loss so far. So among checkpoints with the same loss, the oldest is the best.
        losses = [(each.best_eval_loss, each.serial, path) for path, each in valid.items()]
        kept |= {path for *_, path in sorted(row for row in losses if row[0] is not None)[:1]}
        problems = []
        for path, manifest in valid.items():
            foreign_files = {file.name for file in path.iterdir()} - manifest.files.keys() - {MANIFEST_FILE}
            if path not in kept and not foreign_files:  # files that a user added are never removed
                removed = hidden_path(path, REMOVED)
                path.rename(removed)
                hit_failpoint("before-remove")
                problems += remove_hidden_directory(removed)
                hit_failpoint("after-prune")
        return problems


def _recover_partial_save(path: Path) -> bool:
    """Rename a hidden directory to its target, and return True, if it is complete and the target does not exist."""
    match = HIDDEN_NAME_PATTERN.fullmatch(path.name)
    assert match is not None
    target = path.with_name(match["name"])
    manifest = read_manifest(path, target.name)
    if target.exists() or isinstance(manifest, str) or find_mismatched_files(path, manifest):
        return False
    path.rename(target)
    fsync_directory(target.parent)
    return True


def _split_into_files(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Divide the tensors of a group into files, and return the tensor names of each file.

    There is at least one file, so that a group without tensors is stored too.
    """
    files: list[list[str]] = [[]]
    file_size = 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.numel() * tensor.element_size()
        if files[-1] and file_size + size > MAX_FILE_BYTES:
            files.append([])
            file_size = 0
        files[-1].append(name)
        file_size += size
    return files


def save_state(
    manager: CheckpointManager, dist_context: DistributedContext, tensors: TensorGroups, state: TrainerState
) -> None:
    """Save a checkpoint from the main process. All ranks must call this.

    If the main process has the full state, the checkpoint is written asynchronously. Otherwise shards are gathered
    tensor by tensor.
    """
    if dist_context.mesh is None:
        if dist_context.is_main_process:
            manager.async_save(tensors, state)
        return
    gatherer = TensorGatherer(tensors)
    try:
        if dist_context.is_main_process:
            manager.save(tensors, state, gatherer.gather_next_to_cpu)
    finally:
        gatherer.gather_remaining()  # even if writing failed, because the other ranks wait in the collectives


def load_latest_state(
    manager: CheckpointManager, dist_context: DistributedContext, log: Callable[[str], None]
) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint on every rank. The main process determines which one it is."""
    checkpoint = manager.load_latest(log=log) if dist_context.is_main_process else None
    step = dist_context.broadcast_int(-1 if checkpoint is None else checkpoint.state.step)
    if step < 0 or checkpoint is not None:
        return checkpoint
    loaded = read_checkpoint(manager.directory / checkpoint_name(step))
    if isinstance(loaded, str):
        raise InputError(
            f"process {dist_context.rank} cannot read {checkpoint_name(step)} ({loaded}); the run directory must be on"
            " a file system that every process can read"
        )
    return loaded


def load_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Load full weights into a model. If the model is sharded, each rank loads its shard.

    If the model has adapters, the weights are those of the adapters.
    """
    if model.adapters:
        if weights.keys() != adapter_state_dict(model).keys():
            raise InputError("the checkpoint belongs to another adapter; resume the run with its own recipe")
        model.load_state_dict(dict(weights), strict=False)
        return
    state_dict = model.state_dict()
    if not any(is_dtensor(tensor) for tensor in state_dict.values()):
        model.load_state_dict(dict(weights))
        return
    if state_dict.keys() != weights.keys():
        raise InputError("the checkpoint belongs to another model; resume the run with its own model")
    for name, tensor in state_dict.items():
        copy_from_full(tensor, weights[name])
