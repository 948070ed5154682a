"""Checkpoint format on disk: safetensors files, state.json, and a manifest with checksums; reading and verifying it."""

import hashlib
import json
import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from cutaway.errors import InputError

CHECKPOINT_FORMAT: Literal[1] = 1
MANIFEST_FILE, STATE_FILE = "manifest.json", "state.json"
FLOAT_KEY = "$float"
"""Key for NaN and infinities, which JSON does not have: {"$float": "nan"}."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    tensor_groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class ManifestEntry(BaseModel):
    """Size and checksum of a file; `group` is the tensor group it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    size: int
    sha256: str
    group: str | None = None


class Manifest(BaseModel):
    """Contents of a checkpoint.

    `serial` is the order in which checkpoints were written: a run that was resumed from an earlier checkpoint has newer
    checkpoints of lower steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal[1] = CHECKPOINT_FORMAT
    step: int
    serial: int
    best_eval_loss: float | None
    files: dict[str, ManifestEntry]
    manifest_sha256: str = ""

    def to_bytes(self) -> bytes:
        """Contents of the manifest file, including a SHA-256 of the rest."""
        digest = sha256_hex(self.model_dump_json(exclude={"manifest_sha256"}).encode())
        return self.model_copy(update={"manifest_sha256": digest}).model_dump_json(indent=1).encode() + b"\n"


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def read_manifest(directory: Path, name: str | None = None) -> Manifest | str:
    """Read a manifest, or return what is wrong with it. Its step must match the directory's name, or `name`."""
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
    """Problems that are visible without reading: files missing, of another size, or not in the manifest."""
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


def read_checkpoint(directory: Path) -> LoadedCheckpoint | str:
    """Read a checkpoint, or return what is wrong with it. The parsed bytes are the ones that were verified."""
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
    state: Any = None
    for name, entry in manifest.files.items():
        try:
            data = (directory / name).read_bytes()
            if sha256_hex(data) != entry.sha256:
                problems.append(f"{name} does not match its SHA-256")
            elif problems:
                continue  # not used, but every damaged file is reported
            elif entry.group is not None:
                tensors.setdefault(entry.group, {}).update(parse_safetensors(data))
            elif name == STATE_FILE:
                state = decode_state(data)
        except OSError as error:
            problems.append(f"{name} cannot be read ({error.strerror})")
        except (SafetensorError, ValueError, KeyError) as error:  # intact, but not readable by this version
            problems.append(f"{name} cannot be parsed ({error})")
    if not problems and not isinstance(state, dict):
        problems.append(f"{STATE_FILE} is missing")
    return "; ".join(problems) or LoadedCheckpoint(manifest.step, directory, tensors, state)


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Encode a state as JSON; values that JSON would change are errors."""
    return (json.dumps(_to_json_value(dict(state), "state"), indent=1) + "\n").encode()


def decode_state(data: bytes) -> Any:
    """Decode the JSON of `encode_state`."""

    def decode_float(entries: dict[str, Any]) -> Any:
        return float(entries[FLOAT_KEY]) if entries.keys() == {FLOAT_KEY} else entries

    return json.loads(data, object_hook=decode_float)


def _to_json_value(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_to_json_value(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in _invalid_keys(value):
            raise InputError(f"{path} has the key {key!r}, which JSON would not preserve; use another string")
        return {key: _to_json_value(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_KEY: repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{path} is a {type(value).__name__}, which JSON would not preserve; use a number, a string, a list or a dict,"
        " or store it as a tensor"
    )


def _invalid_keys(value: dict[Any, Any]) -> Iterator[Any]:
    return (key for key in value if not isinstance(key, str) or key == FLOAT_KEY)
