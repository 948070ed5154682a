"""Load a checkpoint from a directory, a training run, a GGUF file or the Hugging Face Hub."""

import difflib
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cutaway.bounded_files import read_json_object
from cutaway.errors import ConfigError, InputError, format_error
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.gguf.load_save import load_gguf
from cutaway.families.native_format import NATIVE_CONFIG_NAME, load_native_checkpoint
from cutaway.families.peft_format import ADAPTER_CONFIG_NAME, load_adapter
from cutaway.families.quantized import open_quantized
from cutaway.families.registry import resolve_family
from cutaway.families.safetensors_reader import TensorReader, check_not_pickle, open_safetensors
from cutaway.families.sentence_transformers import SETTINGS_NAME, add_projection, read_modules
from cutaway.families.weight_loader import LoadOptions, load_model
from cutaway.pretrained import DEFAULT_MODEL, find_pretrained, list_pretrained

if TYPE_CHECKING:
    from cutaway.tokenizer import Tokenizer

_HUB_ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
"""Files downloaded from a Hub repository: no code, no pickles."""
RUN_FILE_NAME = "run.json"
"""The file that marks a training run directory."""


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """Load a checkpoint: a transformers or cutaway directory, a training run, a .gguf file, a PEFT adapter or a Hub id.

    A Hub id is 'owner/name[@revision]'. The models of `cutaway.pretrained`, such as 'tiny-english', are loaded by name.
    A preset has no weights: use `ct.build`.

    `dtype` is the dtype of the weights, by default the stored one. `check_finite` says whether all weights are checked
    for NaN and infinity. By default, all weights are checked in checkpoints of up to half a gigabyte. In larger
    checkpoints only small tensors are checked, so that memory-mapped pages are not read before their first use.
    `progress(done, total)` is called after each loaded tensor.
    """
    path = resolve_checkpoint_path(source)
    options = LoadOptions(device, dtype, check_finite, progress)
    if path.is_file():
        return _load_file(path, options)
    try:
        next(path.iterdir(), None)
    except NotADirectoryError:
        raise InputError(f"'{path}' is not a file or directory; pass a model directory or a .gguf file") from None
    except OSError as error:
        raise InputError(f"'{path}' cannot be opened: {error.strerror}") from None
    if (path / RUN_FILE_NAME).is_file():
        path = path / "model"
        if not path.is_dir():
            hint = f"finish it with: cutaway train --resume {source}"
            raise InputError(f"'{source}' is a training run without a saved model; {hint}")
    if (path / ADAPTER_CONFIG_NAME).is_file() and not (path / "config.json").exists():
        return _load_with_adapter(path, options)
    if (path / NATIVE_CONFIG_NAME).exists():
        model, config, report = load_native_checkpoint(path, options)
        return Checkpoint(model, config, None, report, tokenizer_loader=partial(_load_tokenizer, path))
    modules = read_modules(path)
    head, body_path, dense_path = modules if modules is not None else (None, path, None)
    root, path = path, body_path
    if not (path / "config.json").exists():
        raise ConfigError(f"'{path}' has no config.json, which describes the model; add this file")
    hf_config = read_json_object(path / "config.json", ConfigError)
    family = resolve_family(hf_config)
    stored = open_safetensors(path)
    if dense_path is not None:
        add_projection(stored, dense_path)
    reader: TensorReader = stored
    if hf_config.get("quantization_config") is not None:
        reader = open_quantized(reader, hf_config.pop("quantization_config"))
    model, config, report = load_model(family, hf_config, reader, str(source), options, head)
    return Checkpoint(
        model,
        config,
        family.name,
        report,
        hf_config,
        _read_optional_json(path / "generation_config.json"),
        partial(_load_tokenizer, path),
        _read_optional_json(root / SETTINGS_NAME),
    )


def _read_optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path, ConfigError) if path.exists() else {}


def _load_with_adapter(path: Path, options: LoadOptions) -> Checkpoint:
    """Load the base model that an adapter directory names, add the adapter, and select it."""
    base = read_json_object(path / ADAPTER_CONFIG_NAME, ConfigError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"'{path}' is an adapter whose adapter_config.json names no base model; load the base model, and then"
            " cutaway.families.peft_format.load_adapter(checkpoint, directory), or set base_model_name_or_path"
        )
    relative = path / base
    source = relative if not Path(base).expanduser().exists() and relative.exists() else base
    try:
        checkpoint = load(source, **asdict(options))
    except InputError as error:
        raise InputError(
            f"'{path}' is an adapter of the base model '{base}', which cannot be loaded: {error}"
        ) from None
    if (path / "tokenizer.json").is_file():
        checkpoint = replace(checkpoint, tokenizer_loader=partial(_load_tokenizer, path))
    return load_adapter(checkpoint, path)


def _load_tokenizer(directory: Path) -> "Tokenizer | None":
    from cutaway.tokenizer import load_tokenizer

    return load_tokenizer(directory)


def _load_file(path: Path, options: LoadOptions) -> Checkpoint:
    check_not_pickle(path)
    if path.suffix == ".gguf":
        return load_gguf(path, options)
    if path.suffix == ".safetensors":
        raise InputError(f"'{path.name}' holds weights without a config.json; pass the directory that holds both")
    raise InputError(f"'{path.name}' is not a checkpoint; pass a model directory, a .gguf file or a Hub id")


def resolve_checkpoint_path(source: str | Path) -> Path:
    """Resolve a source to a local file or directory. A Hub id is downloaded, unless it is already in the Hub cache."""
    if not isinstance(source, str | Path) or not str(source).strip():
        raise InputError(f"{source!r} is not a checkpoint; pass a model directory, a .gguf file or a Hub id")
    try:
        path = Path(source).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(source)[:80]!r} cannot be opened: {reason}") from None
    if (pretrained := find_pretrained(str(source))) is not None:
        return pretrained
    _check_not_preset(str(source))
    name, _, revision = str(source).partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) or ".." in name:
        near = difflib.get_close_matches(str(source), list_pretrained(), n=1)
        suggestion = f"; did you mean '{near[0]}'?" if near else ""
        hint = "pass a model directory, a .gguf file or a Hub id ('owner/name')"
        raise InputError(f"'{source}' does not exist; {hint}{suggestion}")
    return _download_from_hub(name, revision or None)


def _check_not_preset(source: str) -> None:
    """Raise if the source is the name of a preset."""
    from cutaway.config import presets  # large tables

    if source in presets():
        raise InputError(
            f"'{source}' is a preset, which has no weights; for random weights use ct.build('{source}') or `cutaway "
            f"open {source}`, for a trained model of the package '{DEFAULT_MODEL}', and for other weights pass a model "
            "directory, a .gguf file or a Hub id ('owner/name')"
        )


def _download_from_hub(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(_HUB_ALLOW_PATTERNS)))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        hint = "check the spelling and the network, or pass a directory"
        raise InputError(f"'{repo_id}' is not stored locally, and the Hub cannot be reached; {hint}") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        hint = "check the name, and log in if it is private"
        raise InputError(f"'{repo_id}' cannot be downloaded: {format_error(error)}; {hint}") from None
