"""Open a checkpoint, from whatever a user has: a directory, a file, or a name on the hub."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cutaway.errors import ConfigError, InputError, WeightError, format_error
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.gguf.load_save import load_gguf
from cutaway.families.native_format import NATIVE_CONFIG_NAME, load_native_checkpoint
from cutaway.families.quantized import open_quantized
from cutaway.families.registry import resolve_family
from cutaway.families.safetensors_reader import (
    PICKLE_SUFFIXES,
    TensorReader,
    open_safetensors,
    pickle_error_message,
    read_json_file,
)
from cutaway.families.weight_loader import load_model
from cutaway.pretrained import find_pretrained

if TYPE_CHECKING:
    from cutaway.tokenizer import Tokenizer

HUB_ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
"""What is fetched of a hub repository: no code, no pickles."""
RUN_FILE_NAME = "run.json"
"""The file that tells a run's directory."""


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """Open a directory of another library's or of cutaway's own, a run's, a .gguf file, or a hub id.

    A hub id is 'owner/name[@revision]'; 'tiny-python' is the model that comes with cutaway.

    Weights keep the dtype they are stored in, unless one is asked for. `check_finite` says whether every number is
    looked at for NaN and infinity; unless given, it is in checkpoints of up to half a gigabyte, and in larger ones only
    small tensors are, so that pages are read when they are used. `progress(done, total)` is called as tensors come.
    """
    path = resolve_checkpoint_path(source)
    load_options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "check_finite": check_finite,
        "progress": progress,
    }
    if path.is_file():
        return _load_file(path, load_options)
    if not path.is_dir():
        raise InputError(f"'{path}' is neither a plain file nor a directory; give a model's directory or a .gguf file")
    try:
        next(path.iterdir(), None)
    except OSError as error:
        raise InputError(f"'{path}' cannot be opened: {error.strerror}") from None
    if (path / RUN_FILE_NAME).is_file():
        path = path / "model"
        if not path.is_dir():
            raise InputError(f"'{source}' is a run without a model yet; finish it: cutaway train --resume {source}")
    if (path / NATIVE_CONFIG_NAME).exists():
        model, config, report = load_native_checkpoint(path, **load_options)
        return Checkpoint(model, config, None, report, tokenizer_loader=partial(_load_tokenizer, path))
    hf_config = read_json_file(path / "config.json", ConfigError) if (path / "config.json").exists() else None
    if hf_config is None:
        raise ConfigError(f"'{path}' has no config.json, so it is not known what model its weights are; add it")
    family = resolve_family(hf_config)
    reader: TensorReader = open_safetensors(path)
    if hf_config.get("quantization_config") is not None:
        reader = open_quantized(reader, hf_config.pop("quantization_config"))
    model, config, report = load_model(family, hf_config, reader, source=str(source), **load_options)
    generation_file = path / "generation_config.json"
    generation_config = read_json_file(generation_file, ConfigError) if generation_file.exists() else {}
    return Checkpoint(model, config, family.name, report, hf_config, generation_config, partial(_load_tokenizer, path))


def _load_tokenizer(directory: Path) -> "Tokenizer | None":
    from cutaway.tokenizer import load_tokenizer

    return load_tokenizer(directory)


def _load_file(path: Path, load_options: dict[str, Any]) -> Checkpoint:
    if path.suffix in PICKLE_SUFFIXES:
        raise WeightError(pickle_error_message(path.name))
    if path.suffix == ".gguf":
        return load_gguf(path, **load_options)
    if path.suffix == ".safetensors":
        raise InputError(f"'{path.name}' is weights without a config.json; give the directory that holds both")
    raise InputError(f"'{path.name}' is no checkpoint; give a model's directory, a .gguf file or a hub id")


def resolve_checkpoint_path(source: str | Path) -> Path:
    """The file or directory that a source means; a hub id is fetched into the hub's own cache, or found there."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise InputError(f"{source!r} is no checkpoint; give a model's directory, a .gguf file or a hub id")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"{str(source)[:80]!r} cannot be opened: {said}") from None
    if (pretrained := find_pretrained(str(source))) is not None:
        return pretrained
    name, _, revision = str(source).partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) or ".." in name:
        raise InputError(
            f"'{source}' does not exist; give a model's directory, a .gguf file or a hub id ('owner/name')"
        )
    return _download_from_hub(name, revision or None)


def _download_from_hub(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(HUB_ALLOW_PATTERNS)))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise InputError(
            f"'{repo_id}' is neither a path here nor in the hub's cache, and the hub cannot be reached; check"
            " the spelling and the network, or give a directory"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"the hub does not give '{repo_id}': {format_error(error)}; check the name, and log in if it is private"
        ) from None
