"""What a checkpoint is on a disk: tensors, a state, and a manifest by which every byte is verified when it is read."""

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
"""JSON has no NaN and no infinity: one is written as {"$float": "nan"}."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and verified."""

    step: int
    path: Path
    tensor_groups: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class ManifestEntry(BaseModel):
    """What the manifest says of a file; its group is the part of the tensors that it holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    size: int
    sha256: str
    group: str | None = None


class Manifest(BaseModel):
    """What a checkpoint is made of.

    The serial number says in which order checkpoints were written: a run that went back and took another way has newer
    ones of lower steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: Literal[1] = CHECKPOINT_FORMAT
    step: int
    serial: int
    best_eval_loss: float | None
    files: dict[str, ManifestEntry]
    manifest_sha256: str = ""

    def to_bytes(self) -> bytes:
        """The file itself, with a sha256 of all the rest in it."""
        digest = sha256_hex(self.model_dump_json(exclude={"manifest_sha256"}).encode())
        return self.model_copy(update={"manifest_sha256": digest}).model_dump_json(indent=1).encode() + b"\n"


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}"


def read_manifest(directory: Path, name: str | None = None) -> Manifest | str:
    """A folder's manifest, or what is wrong with it. Its step must be that of the folder's, or the given, name."""
    try:
        data = (directory / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return f"{MANIFEST_FILE} is missing"
    except OSError as error:
        return f"{MANIFEST_FILE} cannot be read ({error.strerror})"
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError:
        return f"{MANIFEST_FILE} is damaged, or of another format than {CHECKPOINT_FORMAT}"
    if manifest.to_bytes() != data:
        return f"{MANIFEST_FILE} is damaged: it differs from its own sha256"
    if checkpoint_name(manifest.step) != (name or directory.name):
        return f"{MANIFEST_FILE} is that of {checkpoint_name(manifest.step)}"
    return manifest


def find_mismatched_files(directory: Path, manifest: Manifest) -> list[str]:
    """What can be seen to be wrong without reading: files that are missing, of another size, or not in the manifest."""
    there = {path.name: path.lstat() for path in directory.iterdir() if path.name != MANIFEST_FILE}
    wrong = []
    for name in sorted(there.keys() | manifest.files.keys()):
        if name not in manifest.files:
            wrong.append(f"{name} is not in the manifest")
        elif name not in there:
            wrong.append(f"{name} is missing")
        elif not stat.S_ISREG(there[name].st_mode):
            wrong.append(f"{name} is no plain file")
        elif there[name].st_size != manifest.files[name].size:
            wrong.append(f"{name} has {there[name].st_size:,} bytes instead of {manifest.files[name].size:,}")
    return wrong


def read_checkpoint(directory: Path) -> LoadedCheckpoint | str:
    """A folder's checkpoint, or what is wrong with it. What is parsed are the very bytes that were verified."""
    manifest = read_manifest(directory)
    if isinstance(manifest, str):
        return manifest
    try:
        wrong = find_mismatched_files(directory, manifest)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if wrong:
        return "; ".join(wrong)
    tensors: dict[str, dict[str, Tensor]] = {}
    state: Any = None
    for name, listed in manifest.files.items():
        try:
            data = (directory / name).read_bytes()
            if sha256_hex(data) != listed.sha256:
                wrong.append(f"{name} differs from its sha256")
            elif wrong:
                continue  # it will not be used, but every damaged file is to be named
            elif listed.group is not None:
                tensors.setdefault(listed.group, {}).update(parse_safetensors(data))
            elif name == STATE_FILE:
                state = decode_state(data)
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
        except (SafetensorError, ValueError, KeyError) as error:  # whole, and yet nothing that this version reads
            wrong.append(f"{name} cannot be understood ({error})")
    if not wrong and not isinstance(state, dict):
        wrong.append(f"{STATE_FILE} is missing")
    return "; ".join(wrong) or LoadedCheckpoint(manifest.step, directory, tensors, state)


def encode_state(state: Mapping[str, Any]) -> bytes:
    """JSON from which the same state comes back: what JSON would change is refused."""
    return (json.dumps(_to_json_value(dict(state), "state"), indent=1) + "\n").encode()


def decode_state(data: bytes) -> Any:
    def number(entries: dict[str, Any]) -> Any:
        return float(entries[FLOAT_KEY]) if entries.keys() == {FLOAT_KEY} else entries

    return json.loads(data, object_hook=number)


def _to_json_value(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_to_json_value(each, f"{path}[{n}]") for n, each in enumerate(value)]
    if isinstance(value, dict):
        for key in _invalid_keys(value):
            raise InputError(f"{path} has the key {key!r}, which would not come back from JSON; use another name")
        return {key: _to_json_value(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_KEY: repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{path} is a {type(value).__name__}, which would not come back from JSON; make it a number, a string, a list"
        " or a dict, or put it among the tensors"
    )


def _invalid_keys(value: dict[Any, Any]) -> Iterator[Any]:
    return (key for key in value if not isinstance(key, str) or key == FLOAT_KEY)
