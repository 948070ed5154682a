"""From a model to a directory that others open: the same mappings as in loading, taken the other way."""

import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cutaway.config import Config, Encoder
from cutaway.errors import InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.config_tree import diff_configs
from cutaway.families.family import Family
from cutaway.families.load_plan import TensorConversion, canonical_keys, expand_mappings
from cutaway.families.native_format import NATIVE_CONFIG_NAME, NativeFamily, write_native_config
from cutaway.families.registry import families, find_family
from cutaway.families.safetensors_reader import SAFE_WEIGHTS_INDEX_NAME
from cutaway.model import Transformer

MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of weights in one file, at most; what writing holds beside the model, too."""


def save(
    checkpoint: Checkpoint | Transformer,
    directory: str | Path,
    *,
    family: str | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a directory that `transformers` opens, or with family='cutaway' one of cutaway's own.

    The family is the one it came from, or the first that can describe the model. The directory appears only when it
    is whole.
    """
    if isinstance(checkpoint, Transformer):
        checkpoint = Checkpoint(checkpoint, checkpoint.config)
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(f"a {type(checkpoint).__name__} cannot be saved; give a Checkpoint or a model")
    target = resolve_output_path(directory)
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise InputError(f"max_shard_size is {max_shard_size!r}; give the bytes of a file, 1 or more")
    if family is not None and not isinstance(family, str):
        raise InputError(f"family is {family!r}; give the name of a family")
    if not callable(progress):
        raise InputError(f"progress is {progress!r}; give a function of (done, total)")
    check_not_on_meta(checkpoint.model)
    _check_output_directory(target, overwrite)
    chosen, hf_config = _resolve_hf_config(checkpoint, family)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    try:
        if isinstance(chosen, NativeFamily):
            write_native_config(checkpoint.config, work)
        else:
            _write_json(work / "config.json", hf_config)
            if checkpoint.generation_config:
                _write_json(work / "generation_config.json", checkpoint.generation_config)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(work)
        _write_shards(chosen, checkpoint.model, work, max_shard_size, progress)
        work.chmod(0o755)
        for file in work.iterdir():  # the library that writes tensors makes files for their owner alone
            if file.is_file():
                file.chmod(0o644)
        _replace_directory(work, target, overwrite=overwrite)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _check_output_directory(target: Path, overwrite: bool) -> None:
    """Only a model's own directory is ever replaced, and only if asked."""
    try:
        if not target.exists() and not target.is_symlink():
            return
        if target.is_symlink() or not target.is_dir():
            raise InputError(f"'{target}' is no directory, and a model is saved as one; name another")
        if not any(target.iterdir()):
            return
    except OSError as error:  # (an InputError is a ValueError: it must not be caught here)
        raise InputError(f"'{str(target)[:80]}' cannot be written to: {error}") from None
    if not overwrite:
        raise InputError(f"'{target}' exists already, and nothing in it is replaced unasked; name another or overwrite")
    if not any((target / name).is_file() for name in ("config.json", NATIVE_CONFIG_NAME)):
        raise InputError(f"'{target}' holds no model, so it is not replaced; name another directory")


def resolve_output_path(target: object) -> Path:
    """The path that a user means."""
    if not isinstance(target, str | Path) or not str(target).strip() or "\0" in str(target):
        raise InputError(f"{target!r} is no path to write to; give a directory's or a file's")
    try:
        path = Path(target).expanduser()
        os.fsencode(path)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{str(target)[:80]!r} is no path: {error}") from None
    return path if path.name not in ("", "..") else path.resolve()


def check_not_on_meta(model: Transformer) -> None:
    """Refuse to write a model of shapes alone."""
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise InputError("the model is on the meta device, where it has shapes and no values; nothing can be saved")


def _replace_directory(staging: Path, target: Path, *, overwrite: bool) -> None:
    """What stood there before goes only when the new is in its place, and only if that was asked for."""
    try:
        staging.replace(target)  # where nothing, or an empty directory, is; no other program can come between
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:
            raise InputError(f"'{target}' was made by another program meanwhile; name another or overwrite") from None
    if _swap_paths(staging, target):
        return  # what was there is now at `staging`, and goes with it
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        target.replace(old / "old")
        try:
            staging.replace(target)
        except OSError:
            (old / "old").replace(target)
            raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def _swap_paths(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can (Linux): at no moment is there nothing under a name."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(-100, os.fsencode(first.absolute()), -100, os.fsencode(second.absolute()), 2) == 0


def _resolve_hf_config(checkpoint: Checkpoint, family_name: str | None) -> tuple[Family, dict[str, Any]]:
    """The family to write, and its config.json: the one that came with the model, as long as it still fits."""
    config: Config = checkpoint.config
    if checkpoint.model.config != config:
        raise InputError("the checkpoint's config is not its model's; put the model's own beside it")
    family_name = family_name or checkpoint.family
    if family_name == "cutaway":
        return NativeFamily(config), {}
    hf_config = checkpoint.hf_config if family_name == checkpoint.family else {}
    family = families()[family_name] if hf_config and family_name else None
    if family is None or diff_configs(
        config, family.config_from_hf(hf_config, head=_has_head(config), pooler=_has_pooler(config))[0]
    ):
        family, written = find_family(config, family_name)
        hf_config = {**hf_config, **written}
    if not checkpoint.hf_config and checkpoint.tokenizer is not None:
        ids = {f"{name}_token_id": getattr(checkpoint.tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        known = {key: value for key, value in ids.items() if value is None or value < config.vocab_size}
        hf_config = hf_config | known
        if config.form == "encoder-decoder":  # what `read_generation_config` takes where no file says it
            hf_config["decoder_start_token_id"] = known.get("bos_token_id")
    dtype = str(checkpoint.model.dtype).removeprefix("torch.")
    kept = {
        key: value for key, value in hf_config.items() if key not in ("torch_dtype", "auto_map", "transformers_version")
    }
    opens = family.architecture if _has_head(config) or family.base_architecture is None else family.base_architecture
    return family, kept | {"architectures": [opens], "dtype": dtype, "torch_dtype": dtype}


def _has_head(config: Config) -> bool:
    return config.head.kind != "none"


def _has_pooler(config: Config) -> bool:
    return isinstance(config, Encoder) and config.pooler


def _write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text.encode("utf-8", "replace").decode(), encoding="utf-8")


def export_weights(
    family: Family, model: Transformer
) -> Iterator[tuple[tuple[str, ...], Callable[[], list[Tensor]], int]]:
    """Their names, a function that makes those tensors, and their bytes, for everything that is written."""
    state = model.state_dict(keep_vars=True)
    first = canonical_keys(model)
    done: set[str] = set()
    bare = not _has_head(model.config)
    for step in expand_mappings(family.weight_mappings, model.config, model):
        if first[step.model_keys[0]] in done:
            continue
        done.update(first[name] for name in step.model_keys)

        def make(step: TensorConversion = step) -> list[Tensor]:
            tensors = step.op.to_checkpoint([state[name].detach() for name in step.model_keys], step.d_head)
            return [tensor.contiguous().cpu() for tensor in tensors]

        size = sum(state[name].numel() * state[name].itemsize for name in step.model_keys)
        yield (
            tuple(name.removeprefix(family.base_model_prefix) if bare else name for name in step.checkpoint_keys),
            make,
            size,
        )
    left = set(first.values()) - done
    if left:
        raise WeightError(f"family '{family.name}' has no place for {', '.join(sorted(left)[:5])}")


def _write_shards(
    family: Family, model: Transformer, directory: Path, max_shard_size: int, progress: Callable[[int, int], None]
) -> None:
    """Shards of at most `max_shard_size` bytes, and an index where there are several."""
    shards: list[list[tuple[tuple[str, ...], Callable[[], list[Tensor]]]]] = [[]]
    filled = total = 0
    for names, make, size in export_weights(family, model):
        if filled and filled + size > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append((names, make))
        filled, total = filled + size, total + size
    places: dict[str, str] = {}
    for n, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: tensor for names, make in shard for name, tensor in zip(names, make(), strict=True)}
        bad = [
            name for name, tensor in tensors.items() if not torch.isfinite(tensor.sum()) and not tensor.isfinite().all()
        ]
        if bad:
            raise WeightError(f"'{bad[0]}' holds values that are NaN or infinite, which no one could load; not saved")
        save_file(_clone_shared_tensors(tensors), directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        progress(n, len(shards))
    if len(shards) > 1:
        _write_json(directory / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})


def _clone_shared_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two tensors in the same memory, which the format refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart
