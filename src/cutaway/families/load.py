"""Open a checkpoint, from whatever a user has: a directory, a file, or a name on the hub."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cutaway.errors import ConfigError, InputError, WeightError, first_line
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.fill import fill_model
from cutaway.families.gguf.convert import load_gguf
from cutaway.families.native import MARK, load_native
from cutaway.families.registry import family_of
from cutaway.families.store import PICKLES, Store, open_directory, read_json, why_no_pickle
from cutaway.families.unpack import unpacked
from cutaway.shipped import where

if TYPE_CHECKING:
    from cutaway.text import Tokenizer

BESIDE = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
"""What is fetched of a hub repository: no code, no pickles."""


RUN = "run.json"
"""The file that tells a run's directory."""


def load(
    source: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """Open a directory of another library's or of cutaway's own, a run's, a .gguf file, or a hub id.

    A hub id is 'owner/name[@revision]'; 'tiny-python' is the model that comes with cutaway.

    Weights keep the dtype they are stored in, unless one is asked for. `check` says whether every number is looked at
    for NaN and infinity; unless given, it is in checkpoints of up to half a gigabyte, and in larger ones only small
    tensors are, so that pages are read when they are used. `progress(done, total)` is called as tensors come.
    """
    path = find(source)
    how: dict[str, Any] = {"device": device, "dtype": dtype, "check": check, "progress": progress}
    if path.is_file():
        return _load_file(path, how)
    if not path.is_dir():
        raise InputError(f"'{path}' is neither a plain file nor a directory; give a model's directory or a .gguf file")
    try:
        next(path.iterdir(), None)
    except OSError as error:
        raise InputError(f"'{path}' cannot be opened: {error.strerror}") from None
    if (path / RUN).is_file():
        path = path / "model"
        if not path.is_dir():
            raise InputError(f"'{source}' is a run without a model yet; finish it: cutaway train --resume {source}")
    if (path / MARK).exists():
        model, config, report = load_native(path, **how)
        return Checkpoint(model, config, None, report, read_tokenizer=partial(_tokenizer, path))
    theirs = read_json(path / "config.json", ConfigError) if (path / "config.json").exists() else None
    if theirs is None:
        raise ConfigError(f"'{path}' has no config.json, so it is not known what model its weights are; add it")
    family = family_of(theirs)
    store: Store = open_directory(path)
    if theirs.get("quantization_config") is not None:
        store = unpacked(store, theirs.pop("quantization_config"))
    model, config, report = fill_model(family, theirs, store, source=str(source), **how)
    beside = path / "generation_config.json"
    generation = read_json(beside, ConfigError) if beside.exists() else {}
    return Checkpoint(model, config, family.name, report, theirs, generation, partial(_tokenizer, path))


def _tokenizer(directory: Path) -> "Tokenizer | None":
    from cutaway.text import tokenizer_from_directory

    return tokenizer_from_directory(directory)


def _load_file(path: Path, how: dict[str, Any]) -> Checkpoint:
    if path.suffix in PICKLES:
        raise WeightError(why_no_pickle(path.name))
    if path.suffix == ".gguf":
        return load_gguf(path, **how)
    if path.suffix == ".safetensors":
        raise InputError(f"'{path.name}' is weights without a config.json; give the directory that holds both")
    raise InputError(f"'{path.name}' is no checkpoint; give a model's directory, a .gguf file or a hub id")


def find(source: str | Path) -> Path:
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
    if (own := where(str(source))) is not None:
        return own
    name, _, revision = str(source).partition("@")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name, re.ASCII) or ".." in name:
        raise InputError(
            f"'{source}' does not exist; give a model's directory, a .gguf file or a hub id ('owner/name')"
        )
    return _fetch(name, revision or None)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(BESIDE)))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError):
        raise InputError(
            f"'{name}' is neither a path here nor in the hub's cache, and the hub cannot be reached; check the spelling"
            " and the network, or give a directory"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"the hub does not give '{name}': {first_line(error)}; check the name, and log in if it is private"
        ) from None
