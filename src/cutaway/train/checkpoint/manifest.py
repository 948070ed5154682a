"""Read and verify checkpoints, which are directories of safetensors files, state.json and a manifest with checksums."""

import hashlib
import math
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from cutaway.train.checkpoint.atomic_directory import list_directory

CHECKPOINT_FORMAT: Literal[1] = 1
MANIFEST_FILE, STATE_FILE = "manifest.json", "state.json"


class TrainerState(BaseModel):
    """State of a run other than its tensors. A checkpoint stores it in state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")  # JSON has no NaN
    step: int
    data_fingerprint: str
    best_eval_loss: float | None = None
    best_step: int | None = None
    """First step with the eval_loss `best_eval_loss`."""
    reference_loss: float | None = None
    """eval_loss with which early stopping compares the next one."""
    num_evals_without_improvement: int = 0
    metrics_bytes: int = 0
    """Size of metrics.jsonl at this step in bytes. A resumed run truncates the file to this size."""
    timings_bytes: int = 0
    """Size of timings.jsonl at this step in bytes."""
    num_threads: int | None = None
    """Number of CPU threads, which determines the order of sums. None on a GPU."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Tensors and state of a checkpoint whose files match their checksums."""

    path: Path
    tensor_groups: dict[str, dict[str, Tensor]]
    state: TrainerState


class ManifestEntry(BaseModel):
    """Size in bytes and checksum of a file of a checkpoint.

    `group` names the state dict whose tensors are in the file, e.g. 'model' or 'optimizer'. It is None for state.json.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    size: int
    sha256: str
    group: str | None = None


class Manifest(BaseModel):
    """List of the files of a checkpoint, with their checksums.

    `serial` numbers the checkpoints in the order in which they were written. This may differ from the order of steps,
    if a run was resumed from an earlier checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal[1] = CHECKPOINT_FORMAT
    step: int
    serial: int
    best_eval_loss: float | None
    files: dict[str, ManifestEntry]
    manifest_sha256: str = ""

    def to_bytes(self) -> bytes:
        """Contents of the manifest file, including the SHA-256 of the other fields."""
        digest = sha256_hex(self.model_dump_json(exclude={"manifest_sha256"}).encode())
        return self.model_copy(update={"manifest_sha256": digest}).model_dump_json(indent=1).encode() + b"\n"


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"step-[0-9]{9,}", name) is not None and name == checkpoint_name(int(name[5:]))


def list_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in a directory, newest first. Checkpoints without a readable manifest precede all others."""
    sort_keys = {}
    for path in list_directory(directory):
        if is_checkpoint_name(path.name) and path.is_dir():
            manifest = read_manifest(path)
            serial = manifest.serial if isinstance(manifest, Manifest) else math.inf
            sort_keys[path] = (serial, int(path.name[5:]))
    return sorted(sort_keys, key=sort_keys.__getitem__, reverse=True)


def read_manifest(directory: Path, name: str | None = None) -> Manifest | str:
    """Read the manifest of a checkpoint directory, or return a description of the problem as a string.

    The step of the manifest must match `name`, which is by default the name of the directory.
    """
    try:
        data = (directory / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except OSError as error:
        return f"{MANIFEST_FILE} cannot be read ({error.strerror})"
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        return f"{MANIFEST_FILE} is damaged, or has a format other than {CHECKPOINT_FORMAT}"
    if manifest.to_bytes() != data:
        return f"{MANIFEST_FILE} is damaged: its SHA-256 does not match"
    if checkpoint_name(manifest.step) != (name or directory.name):
        return f"{MANIFEST_FILE} belongs to {checkpoint_name(manifest.step)}"
    return manifest


def find_mismatched_files(directory: Path, manifest: Manifest) -> list[str]:
    """Return a message for each file that is missing, has the wrong size or is not in the manifest. No file is read."""
    stats = {path.name: path.lstat() for path in directory.iterdir() if path.name != MANIFEST_FILE}
    problems = []
    for name in sorted(stats.keys() | manifest.files.keys()):
        if name not in manifest.files:
            problems.append(f"{name} is not in the manifest")
        elif name not in stats:
            problems.append(f"{name} is missing")
        elif not stat.S_ISREG(stats[name].st_mode):
            problems.append(f"{name} is not a regular file")
        elif stats[name].st_size != manifest.files[name].size:
            problems.append(f"{name} has {stats[name].st_size:,} bytes instead of {manifest.files[name].size:,}")
    return problems


def read_checkpoint(directory: Path, groups: Collection[str] | None = None) -> LoadedCheckpoint | str:
    """Read and verify a checkpoint, or return a description of the problems as a string. Each file is read once.

    With `groups`, files of other groups, such as the optimizer state, are not read.
    """
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        return manifest
    try:
        problems = find_mismatched_files(directory, manifest)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if problems:
        return "; ".join(problems)
    tensors: dict[str, dict[str, Tensor]] = {}
    state = None
    for name, entry in manifest.files.items():
        if groups is not None and entry.group is not None and entry.group not in groups:
            continue
        try:
            data = (directory / name).read_bytes()
            if sha256_hex(data) != entry.sha256:
                problems.append(f"{name} does not match its SHA-256")
            elif problems:
                continue  # do not parse more files, but check all of them, to report every damaged file
            elif entry.group is not None:
                tensors.setdefault(entry.group, {}).update(parse_safetensors(data))
            elif name == STATE_FILE:
                state = TrainerState.model_validate_json(data)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
        except (SafetensorError, ValueError, KeyError) as error:  # the file is intact, but this version cannot parse it
            problems.append(f"{name} cannot be parsed ({error})")
    if problems or state is None:
        return "; ".join(problems) or f"{STATE_FILE} is missing"
    return LoadedCheckpoint(directory, tensors, state)
