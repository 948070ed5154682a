"""Load a checkpoint from a directory, a training run, a GGUF file or the Hugging Face Hub."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cutaway.bounded_files import read_json_object
from cutaway.config import Config
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, InputError, format_error
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.gguf.load_save import load_gguf, load_gguf_config
from cutaway.families.native_format import NATIVE_CONFIG_NAME, load_native_checkpoint
from cutaway.families.peft_format import ADAPTER_CONFIG_NAME, load_adapter
from cutaway.families.quantized import open_quantized, read_dtype
from cutaway.families.registry import resolve_family
from cutaway.families.safetensors_reader import TensorReader, check_not_pickle, open_safetensors
from cutaway.families.save import merge_adapters
from cutaway.families.sentence_transformers import SETTINGS_NAME, add_projection, read_modules
from cutaway.families.weight_loader import LoadOptions, load_model, resolve_config
from cutaway.model.parallel.offload import MaxMemory
from cutaway.pretrained import DEFAULT_MODEL, find_pretrained, list_pretrained

if TYPE_CHECKING:
    from cutaway.tokenizer import Tokenizer

_HUB_ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm")
"""Files downloaded from a Hub repository: no code, no pickles."""
GENERATION_CONFIG_NAME = "generation_config.json"
AdapterSources = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
"""Adapters of `load`: one directory, several, or directories by name."""
RUN_FILE_NAME = "run.json"
"""The file that marks a training run directory."""


def load(
    source: str | Path,
    *,
    adapters: AdapterSources | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    device_map: str | None = None,
    max_memory: MaxMemory | None = None,
    tensor_parallel_size: int = 1,
    dequantize: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Checkpoint:
    """Load a checkpoint: a transformers or cutaway directory, a training run, a .gguf file, a PEFT adapter or a Hub id.

    A Hub id is 'owner/name[@revision]'. The models of `cutaway.pretrained`, such as 'tiny-english', are loaded by name.
    A preset has no weights: use `ct.build`.

    `adapters` are LoRA adapters to add to the model: PEFT directories, runs or Hub ids by name, as in
    `ct.load("base", adapters={"sql": "runs/sql", "chat": "runs/chat"})`; one such source has the name 'default', and a
    list uses the names of the directories. The first one is active; `model.set_adapter` and
    `ct.generate(…, adapter="chat")` select another. Adapters are loaded with their own tokenizer, if all have the same.

    `dtype` is the dtype of the weights, by default the stored one. `check_finite` says whether all weights are checked
    for NaN and infinity. By default, all weights are checked in checkpoints of up to half a gigabyte. In larger
    checkpoints only small tensors are checked, so that memory-mapped pages are not read before their first use.
    `device_map='auto'` places the weights on the GPU as far as they fit into 90 % of its free memory, or into
    `max_memory`, as in {0: '10GiB', 'cpu': '30GiB'}. The other blocks are in CPU memory, and each forward pass copies
    them to the GPU; `load_report` says how many bytes and how fast. Without a GPU, all weights are in CPU memory.
    `tensor_parallel_size`: number of processes, started by torchrun, over which the model is split for inference. Each
    process reads its own part of the weights, and all of them call the model or `ct.generate` with the same arguments.
    `dequantize=False` keeps the matrices of a quantized checkpoint packed, on the CPU or an NVIDIA GPU: the model takes
    about as much memory as the file. Matrices that no block format represents are dequantized, and `load_report` counts
    them. Packed weights cannot be changed, so that this is for inference.
    `progress(done, total)` is called after each loaded tensor.
    """
    options = LoadOptions(
        device, dtype, check_finite, progress, tensor_parallel_size, device_map, max_memory, dequantize
    )
    if adapters is not None:
        return _load_with_adapters(source, name_adapters(adapters), options)
    path = resolve_checkpoint_path(source)
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
    quantized = None
    if hf_config.get("quantization_config") is not None:
        quantization_config, dtype = hf_config.pop("quantization_config"), options.dtype or read_dtype(hf_config)
        reader = quantized = open_quantized(stored, quantization_config, dtype, packed=options.keeps_packed)
    model, config, report = load_model(family, hf_config, reader, str(source), options, head)
    report.quantization = [] if quantized is None else quantized.describe()
    return Checkpoint(
        model,
        config,
        family.name,
        report,
        hf_config,
        _read_optional_json(path / GENERATION_CONFIG_NAME),
        partial(_load_tokenizer, path),
        _read_optional_json(root / SETTINGS_NAME),
    )


def _read_optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path, ConfigError) if path.exists() else {}


def _load_with_adapters(source: str | Path, adapters: Mapping[str, str | Path], options: LoadOptions) -> Checkpoint:
    """Load a checkpoint and add adapters, of which the first is active."""
    paths = {name: resolve_checkpoint_path(directory) for name, directory in adapters.items()}  # before a large base
    checkpoint = add_adapters(load(source, **asdict(options)), paths)
    if paths:
        checkpoint.model.set_adapter(next(iter(paths))).requires_grad_(False)
    return checkpoint


def add_adapters(checkpoint: Checkpoint, adapters: Mapping[str, str | Path]) -> Checkpoint:
    """Add adapters by name to a checkpoint, and their tokenizer and generation config, if all have the same."""
    paths = {name: resolve_checkpoint_path(directory) for name, directory in adapters.items()}
    for name, path in paths.items():
        checkpoint = load_adapter(checkpoint, path, name)
    if paths and _have_equal_tokenizers(list(paths.values())):
        checkpoint = _use_adapter_tokenizer(checkpoint, next(iter(paths.values())))
    return checkpoint


def name_adapters(adapters: AdapterSources) -> dict[str, str | Path]:
    """Adapter directories by name: a single one is 'default', and those of a list have the names of the directories."""
    if isinstance(adapters, str | Path):
        return {"default": adapters}
    if isinstance(adapters, Mapping):
        return dict(adapters)
    if not isinstance(adapters, Sequence):
        raise InputError(f"adapters is a {type(adapters).__name__}; pass a dict of directories by name, or a list")
    named = {Path(each).expanduser().name: each for each in adapters}
    if len(named) < len(adapters):
        raise InputError("adapters has directories of the same name; pass a dict, such as {'sql': 'runs/sql/model'}")
    return named


def load_config(source: str | Path) -> Config:
    """Config of a checkpoint that `load` can load. Weights are not read, except headers."""
    path = resolve_checkpoint_path(source)
    if path.is_file():
        check_not_pickle(path)
        return load_gguf_config(path)
    if (path / RUN_FILE_NAME).is_file():
        path = path / "model"
    if (path / ADAPTER_CONFIG_NAME).is_file() and not (path / "config.json").exists():
        _check_base_chain(path)
        return load_config(_require_base(path))
    if (path / NATIVE_CONFIG_NAME).exists():
        return read_config(path)
    head, path, _ = read_modules(path) or (None, path, None)
    if not (path / "config.json").exists():
        return read_config(path)
    hf_config = read_json_object(path / "config.json", ConfigError)
    unquantized = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    return resolve_config(resolve_family(hf_config), unquantized, open_safetensors(path), head)[0]


def _require_base(path: Path) -> str:
    """Source of the base model that an adapter directory names. Raises InputError if it names none."""
    base = read_adapter_base(path)
    if base is None:
        raise InputError(
            f"'{path}' is an adapter whose adapter_config.json names no base model (base_model_name_or_path); pass the"
            f" base model too: ct.load(base, adapters={str(path)!r}), or on the command line BASE --adapter {path}"
        )
    return base


def _load_with_adapter(path: Path, options: LoadOptions) -> Checkpoint:
    """Load the base model that an adapter directory names, add the adapter, and select it."""
    base = _require_base(path)
    _check_base_chain(path)
    try:
        checkpoint = load(base, **asdict(options))
    except InputError as error:
        raise InputError(
            f"'{path}' is an adapter of the base model '{base}', which cannot be loaded: {error}; if the base is at"
            f" another place, pass it: ct.load(base, adapters={str(path)!r}), or BASE --adapter {path}"
        ) from None
    checkpoint = merge_adapters(checkpoint)  # the base may be an adapter of another base
    return load_adapter(_use_adapter_tokenizer(checkpoint, path), path)


def _adapter_directory(path: Path) -> Path:
    """The directory of an adapter: that of the model if `path` is a run, else `path` itself."""
    return path / "model" if (path / RUN_FILE_NAME).is_file() else path


def _check_base_chain(path: Path) -> None:
    """Raise InputError if the base of an adapter is the adapter itself, directly or by way of other adapters."""
    seen = {path.resolve()}
    base = read_adapter_base(path)
    while base is not None and Path(base).expanduser().is_dir():
        directory = _adapter_directory(Path(base).expanduser().resolve())
        if directory in seen:
            raise InputError(
                f"'{path}' is an adapter whose base models are adapters of each other; correct"
                f" base_model_name_or_path in '{path / ADAPTER_CONFIG_NAME}'"
            )
        seen.add(directory)
        is_adapter = (directory / ADAPTER_CONFIG_NAME).is_file() and not (directory / "config.json").exists()
        base = read_adapter_base(directory) if is_adapter else None


def _use_adapter_tokenizer(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Replace the tokenizer and the generation config by those in an adapter directory or a run, if it has them.

    Training may have added a chat template, and an end-of-turn token at which generation stops.
    """
    path = _adapter_directory(path)
    if (path / "tokenizer.json").is_file():
        checkpoint = replace(checkpoint, tokenizer_loader=partial(_load_tokenizer, path))
    if (path / GENERATION_CONFIG_NAME).is_file():
        generation_config = read_json_object(path / GENERATION_CONFIG_NAME, ConfigError)
        checkpoint = replace(checkpoint, generation_config=generation_config)
    return checkpoint


def read_adapter_base(source: str | Path) -> str | None:
    """Base model that the adapter_config.json of an adapter or a run names. None if it names none.

    A path that does not exist is looked up relative to the directory of the adapter."""
    path = resolve_checkpoint_path(source)
    path = _adapter_directory(path)
    base = read_json_object(path / ADAPTER_CONFIG_NAME, ConfigError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return None
    is_relative = not Path(base).expanduser().exists() and (path / base).exists()
    return str(path / base) if is_relative else base


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", GENERATION_CONFIG_NAME)


def _have_equal_tokenizers(paths: Sequence[Path]) -> bool:
    """Whether adapter directories or runs have the same tokenizer, chat template and generation config."""
    directories = list(map(_adapter_directory, paths))

    def have_equal(name: str) -> bool:
        files = [path / name for path in directories]
        contents = {file.read_bytes() if file.is_file() else None for file in files}
        return len(contents) == 1

    return all(map(have_equal, _TOKENIZER_FILES))


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
