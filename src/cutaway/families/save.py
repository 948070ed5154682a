"""Save a checkpoint as a transformers or native directory, with the inverse of the weight mappings of loading."""

import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cutaway.config import Config, EmbeddingHead, SequenceClassificationHead
from cutaway.errors import InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.config_tree import diff_configs
from cutaway.families.family import EMBEDDING_PROJECTION, Family
from cutaway.families.load_plan import TensorConversion, canonical_keys, expand_mappings
from cutaway.families.native_format import NATIVE_CONFIG_NAME, NativeFamily, write_native_config
from cutaway.families.registry import families, find_family
from cutaway.families.safetensors_reader import SAFE_WEIGHTS_INDEX_NAME
from cutaway.families.sentence_transformers import write_modules
from cutaway.model import Transformer
from cutaway.model.head import PoolingHead
from cutaway.model.parallel.process_group import check_not_split
from cutaway.quantization.quantized_tensor import QuantizedTensor

_MAX_SHARD_SIZE = 5_000_000_000
"""Maximum number of bytes of weights per file. Saving needs up to this much memory in addition to the model."""


def save(
    checkpoint: Checkpoint | Transformer,
    directory: str | Path,
    *,
    family: str | None = None,
    max_shard_size: int = _MAX_SHARD_SIZE,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Save a checkpoint as a directory for `transformers`, or with family='cutaway' in the native format.

    The default family is the one that the checkpoint was loaded from, or the first that can represent the model. The
    directory is written under a temporary name and renamed when complete. `progress(done, total)` is called after each
    shard. If the model has an active adapter, the merged weights are saved; `save_adapter` saves the adapter alone.
    """
    checkpoint = as_checkpoint(checkpoint)
    check_not_split(checkpoint.model, "saving")
    checkpoint = merge_adapters(checkpoint)
    target = resolve_output_path(directory)
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise InputError(f"max_shard_size is {max_shard_size!r}; pass the maximum number of bytes per file, at least 1")
    if family is not None and not isinstance(family, str):
        raise InputError(f"family is {family!r}; pass the name of a family")
    if not callable(progress):
        raise InputError(f"progress is {progress!r}; pass a function of (done, total)")
    _check_output_directory(target, overwrite)
    saved_family, hf_config = _resolve_hf_config(checkpoint, family)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    try:
        if isinstance(saved_family, NativeFamily):
            write_native_config(checkpoint.config, staging)
        else:
            _write_json(staging / "config.json", hf_config)
            if checkpoint.generation_config:
                _write_json(staging / "generation_config.json", checkpoint.generation_config)
            _write_embedding_modules(checkpoint, staging)
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(staging)
        _write_shards(saved_family, checkpoint.model, staging, max_shard_size, progress)
        staging.chmod(0o755)
        for file in staging.rglob("*"):  # safetensors creates files readable only by their owner
            if file.is_file():
                file.chmod(0o644)
        _replace_directory(staging, target, overwrite=overwrite)
    except (OSError, SafetensorError) as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _check_output_directory(target: Path, overwrite: bool) -> None:
    """Raise InputError unless `target` is new, is empty, or contains a model and `overwrite` is True."""
    try:
        if not target.exists() and not target.is_symlink():
            return
        if target.is_symlink() or not target.is_dir():
            raise InputError(f"'{target}' is not a directory, but a model is saved as one; pass another path")
        if not any(target.iterdir()):
            return
    except OSError as error:  # InputError is a ValueError, so the errors above are not caught here
        raise InputError(f"'{str(target)[:80]}' cannot be written to: {error}") from None
    if not overwrite:
        raise InputError(f"'{target}' exists already; pass another directory, or overwrite=True")
    if not any((target / name).is_file() for name in ("config.json", NATIVE_CONFIG_NAME)):
        raise InputError(f"'{target}' does not contain a model, so it is not overwritten; pass another directory")


def resolve_output_path(target: object) -> Path:
    """Return an output path with '~' expanded; raise InputError if it is not a valid path."""
    if not isinstance(target, str | Path) or not str(target).strip() or "\0" in str(target):
        raise InputError(f"{target!r} is not a path to write to; pass the path of a directory or file")
    try:
        path = Path(target).expanduser()
        os.fsencode(path)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"{str(target)[:80]!r} is not a valid path: {error}") from None
    return path if path.name not in ("", "..") else path.resolve()


def as_checkpoint(value: Checkpoint | Transformer) -> Checkpoint:
    """Wrap a model in a checkpoint, or return a checkpoint. Raise InputError for other types and the meta device."""
    checkpoint = Checkpoint(value, value.config) if isinstance(value, Transformer) else value
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(f"a {type(value).__name__} cannot be saved; pass a Checkpoint or a model")
    if any(tensor.is_meta for tensor in checkpoint.model.state_dict().values()):
        raise InputError("the model is on the meta device, where tensors have no values; build it on another device")
    return checkpoint


def merge_adapters(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint, or a copy whose model has the active adapter merged into the weights."""
    if not checkpoint.model.adapters:
        return checkpoint
    return replace(checkpoint, model=checkpoint.model.merge_and_unload())


def _replace_directory(staging: Path, target: Path, *, overwrite: bool) -> None:
    """Rename `staging` to `target`; an existing target is deleted only after the rename, and only with overwrite."""
    try:
        staging.replace(target)  # atomic; succeeds if target is absent or an empty directory
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not overwrite:
            hint = "pass another directory, or overwrite=True"
            raise InputError(f"'{target}' was created by another process meanwhile; {hint}") from None
    if _swap_paths(staging, target):
        return  # the old contents are now in `staging`, which the caller deletes
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
    """Exchange two paths atomically (renameat2 with RENAME_EXCHANGE); return False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(-100, os.fsencode(first.absolute()), -100, os.fsencode(second.absolute()), 2) == 0


def _resolve_hf_config(checkpoint: Checkpoint, family_name: str | None) -> tuple[Family, dict[str, object]]:
    """Return the family to save as, and its config.json: the loaded one, updated if the Config has changed."""
    config = checkpoint.config
    if checkpoint.model.config != config:
        raise InputError("checkpoint.config differs from checkpoint.model.config; set both to the same Config")
    family_name = family_name or checkpoint.family
    if family_name == "cutaway":
        return NativeFamily(config), {}
    hf_config = checkpoint.hf_config if family_name == checkpoint.family else {}
    family = families()[family_name] if hf_config and family_name else None
    if family is not None:
        architectures = [family.architecture_for(config)]
        loaded_config = family.config_like(config, {**hf_config, "architectures": architectures})
    if family is None or diff_configs(config, loaded_config):
        family, new_config = find_family(config, family_name)
        if new_config.get("pad_token_id") is None and hf_config.get("pad_token_id") is not None:
            new_config = {key: value for key, value in new_config.items() if key != "pad_token_id"}
        hf_config = {key: value for key, value in hf_config.items() if key != "num_labels"} | new_config
    if not checkpoint.hf_config and checkpoint.tokenizer is not None:
        ids = {f"{name}_token_id": getattr(checkpoint.tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        known = {key: value for key, value in ids.items() if value is None or value < config.vocab_size}
        hf_config = hf_config | known
        if config.form == "encoder-decoder":  # as `read_generation_config` does by default
            hf_config["decoder_start_token_id"] = known.get("bos_token_id")
    if config.form == "decoder" and isinstance(config.head, SequenceClassificationHead):
        hf_config = hf_config | {"pad_token_id": config.head.pad_token_id}
    dtype = str(checkpoint.model.dtype).removeprefix("torch.")
    dropped = ("torch_dtype", "auto_map", "transformers_version")
    saved_config = {key: value for key, value in hf_config.items() if key not in dropped}
    architectures = [family.architecture_for(config)]
    return family, saved_config | {"architectures": architectures, "dtype": dtype, "torch_dtype": dtype}


def _write_embedding_modules(checkpoint: Checkpoint, directory: Path) -> None:
    """Write the files of sentence-transformers, if the model has a head for embeddings."""
    head, model = checkpoint.config.head, checkpoint.model
    if isinstance(head, EmbeddingHead):
        assert isinstance(model.head, PoolingHead)
        projection = model.head.get_submodule("projection").state_dict() if head.projection else {}
        write_modules(directory, head, checkpoint.config.d_model, projection, checkpoint.sentence_transformers_config)


def has_class_with_head(config: Config) -> bool:
    """Whether the transformers class has a head, so that the names of the body's tensors have the family's prefix."""
    return config.head.kind not in ("none", "embedding")


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text.encode("utf-8", "replace").decode(), encoding="utf-8")


ExportedTensors = tuple[tuple[str, ...], Callable[[], list[Tensor]], int]
"""Checkpoint keys, a function that returns the tensors of these keys, and the size of the tensors in bytes."""


def export_weights(family: Family, model: Transformer) -> Iterator[ExportedTensors]:
    """Yield the weights of a model as (checkpoint keys of `family`, function that returns their tensors, bytes)."""
    state = model.state_dict(keep_vars=True)
    canonical = canonical_keys(model)
    exported: set[str] = set()
    prefix = "" if has_class_with_head(model.config) else family.base_model_prefix
    for conversion in expand_mappings(family.weight_mappings_for(model.config), model.config, model):
        if canonical[conversion.model_keys[0]] in exported and not conversion.save_only:
            continue
        exported.update(canonical[name] for name in conversion.model_keys)

        def convert(conversion: TensorConversion = conversion) -> list[Tensor]:
            tensors = [state[name].detach() for name in conversion.model_keys]
            tensors = [tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor for tensor in tensors]
            return [tensor.contiguous().cpu() for tensor in conversion.op.to_checkpoint(tensors, conversion.d_head)]

        size = sum(state[name].numel() * state[name].itemsize for name in conversion.model_keys)
        yield tuple(name.removeprefix(prefix) for name in conversion.checkpoint_keys), convert, size
    if unmapped := sorted(set(canonical.values()) - exported):
        names = ", ".join(unmapped[:5])
        raise WeightError(f"family '{family.name}' has no weight mapping for {names}; use another family")


def _write_shards(
    family: Family, model: Transformer, directory: Path, max_shard_size: int, progress: Callable[[int, int], None]
) -> None:
    """Write the weights as safetensors shards of at most `max_shard_size` bytes, and an index if there are several."""
    shards: list[list[ExportedTensors]] = [[]]
    shard_size = total = 0
    for exported in export_weights(family, model):
        if isinstance(model.config.head, EmbeddingHead) and exported[0][0].startswith(
            EMBEDDING_PROJECTION.checkpoint_key
        ):
            continue  # in the directory of the module Dense
        size = exported[2]
        if shard_size and shard_size + size > max_shard_size:
            shards.append([])
            shard_size = 0
        shards[-1].append(exported)
        shard_size, total = shard_size + size, total + size
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for names, convert, _ in shard:
            tensors.update(zip(names, convert(), strict=True))
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor.sum()) and not tensor.isfinite().all():
                raise WeightError(f"'{name}' has NaN or infinite values, which cannot be loaded; nothing is saved")
        save_file(_clone_shared_tensors(tensors), directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        progress(i, len(shards))
    if len(shards) > 1:
        _write_json(directory / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _clone_shared_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without shared storage, which safetensors rejects: of each storage, all but one are cloned."""
    first: dict[int, str] = {}
    owners = {name: first.setdefault(t.untyped_storage().data_ptr(), name) for name, t in tensors.items()}
    return {name: t if owners[name] == name else t.clone() for name, t in tensors.items()}
