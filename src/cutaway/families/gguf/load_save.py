"""Load and save checkpoints as GGUF files."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cutaway.config import Config, LMHead, to_dict
from cutaway.config import config as read_config
from cutaway.config.serialization import map_dicts
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.gguf.architectures import GGUF_ARCHITECTURES
from cutaway.families.gguf.file_format import QUANTIZATIONS, GGUFFile, write_gguf
from cutaway.families.gguf.rope_fields import ROPE_TENSORS
from cutaway.families.save import ExportedTensors, as_checkpoint, export_weights, merge_adapters, resolve_output_path
from cutaway.families.weight_loader import LoadOptions, load_model, resolve_config
from cutaway.model import Transformer

if TYPE_CHECKING:
    from cutaway.tokenizer import Tokenizer

_TOKEN_ID_NAMES = {"bos": "bos_token_id", "padding": "pad_token_id"}
_TOKEN_ID_KEY_FORMAT = "tokenizer.ggml.{}_token_id"
_EOS_TOKEN_NAMES = ("eos", "eot", "eom")
"""Metadata names of end-of-text, end-of-turn and end-of-message (tool call) tokens."""
_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Texts of end-of-turn tokens. Most chat models store only the end-of-text id; llama.cpp also matches these texts."""


def load_gguf(path: Path, options: LoadOptions) -> Checkpoint:
    """Load a GGUF file. Quantized tensors are dequantized, unless they stay packed (`LoadOptions.keeps_packed`)."""
    file, family, metadata = _open_gguf(path, dequantize=not options.keeps_packed)
    model, config, report = load_model(family, metadata, file, str(path), options)
    ids = {key: file.metadata.get(_TOKEN_ID_KEY_FORMAT.format(name)) for name, key in _TOKEN_ID_NAMES.items()}
    ids["eos_token_id"] = _eos_token_ids(file)
    generation_config = {key: value for key, value in ids.items() if value is not None}
    return Checkpoint(model, config, family.architecture, report, {}, generation_config, partial(_load_tokenizer, file))


def load_gguf_config(path: Path) -> Config:
    """Config of a GGUF file, without its weights. The head is tied unless the file has a matrix of its own for it."""
    file, family, metadata = _open_gguf(path)
    config = resolve_config(family, metadata, file)[0]
    return config.replace({"head.tied": False}) if "output.weight" in file.tensor_infos else config


def gguf_format_sizes(path: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """{kind: {format: (number of weights, number of bytes)}} of the matrices of a GGUF file.

    The kinds are 'layer', 'embedding' and, if the LM head has a matrix of its own, 'output'."""
    file = GGUFFile(path)
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for name, info in file.tensor_infos.items():
        if len(info.shape) < 2:
            continue
        kind = {"token_embd.weight": "embedding", "output.weight": "output"}.get(name, "layer")
        formats = sizes.setdefault(kind, {})
        format_name = info.quantization or str(info.dtype).removeprefix("torch.")
        num_weights, num_bytes = formats.get(format_name, (0, 0))
        formats[format_name] = num_weights + info.numel, num_bytes + file.locations[name][1]
    return sizes


def _open_gguf(path: Path, *, dequantize: bool = True) -> tuple[GGUFFile, Family, dict[str, Any]]:
    """Open a GGUF file. Returns the file, its family and the metadata that describe the model."""
    file = GGUFFile(path, dequantize=dequantize)
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise ConfigError(f"'{path.name}' has the unsupported architecture {arch!r}; cutaway supports {known}")
    family = GGUF_ARCHITECTURES[arch]
    metadata = {key: value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" in file.tensor_infos:
        metadata.setdefault(f"{arch}.vocab_size", file.tensor_infos["token_embd.weight"].shape[0])
    for name in ROPE_TENSORS:
        if name in file.tensor_infos:
            if file.tensor_infos[name].numel > 4096:
                raise WeightError(f"tensor '{name}' has {file.tensor_infos[name].numel:,} factors; the file is damaged")
            metadata[name] = [float(f"{value:.7g}") for value in file.read_tensor(name).flatten().tolist()]
    _check_known_keys(family, metadata)
    return file, family, metadata


def _check_known_keys(family: Family, metadata: Mapping[str, object]) -> None:
    """Raise on an unknown metadata key of the architecture, because it could change the model."""
    known = {key for entry in family.fields for key in entry.keys} | family.ignored_config_keys.keys()
    unknown = sorted(metadata.keys() - known)
    if unknown:
        key = f"the metadata key '{unknown[0]}' ({metadata[unknown[0]]!r})"
        raise ConfigError(f"{key} is not supported by cutaway and could change the model; load its safetensors")


def _eos_token_ids(gguf_file: GGUFFile) -> object:
    """The end-of-sequence token id of a GGUF file, a list if there are several, or None if there is none."""
    ids = [gguf_file.metadata.get(_TOKEN_ID_KEY_FORMAT.format(name)) for name in _EOS_TOKEN_NAMES]
    tokens = gguf_file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and ids[1] is None:
        ids += [tokens.index(end) for end in _END_OF_TURN_TOKENS if end in tokens]
    unique_ids = [token_id for i, token_id in enumerate(ids) if token_id is not None and token_id not in ids[:i]]
    return unique_ids if len(unique_ids) > 1 else next(iter(unique_ids), None)


def _load_tokenizer(gguf_file: GGUFFile) -> "Tokenizer | None":
    from cutaway.tokenizer import tokenizer_from_gguf

    fields = {key: value for key, value in gguf_file.metadata.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf(fields) if fields else None


def find_architecture(config: Config, preferred: str | None = None) -> tuple[Family, dict[str, object]]:
    """Return a GGUF architecture that can represent a Config (the preferred one, if it can), and its metadata.

    Dropout is removed, because GGUF is an inference format and does not store it.
    """
    if config.form != "decoder":
        raise ConfigError(f"the model is of form '{config.form}', but only decoders can be saved as GGUF; use --to hf")
    if not isinstance(config.head, LMHead):
        raise ConfigError(
            f"the model has a head of kind '{config.head.kind}', but only language models can be saved as GGUF; use"
            " --to hf"
        )
    config = read_config(map_dicts(to_dict(config), _without_dropout))
    errors = []
    for family in sorted(GGUF_ARCHITECTURES.values(), key=lambda family: family.architecture != preferred):
        try:
            return family, family.config_to_hf(config)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(f"no GGUF architecture can represent this model. {min(errors, key=len)}")


def _without_dropout(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if not key.endswith("dropout")}


def save_gguf(
    model: Checkpoint | Transformer, path: str | Path, *, quantization: str | None = None, overwrite: bool = False
) -> Path:
    """Save a model or a checkpoint as one GGUF file. Matrices keep their dtype unless `quantization` is set."""
    checkpoint = merge_adapters(as_checkpoint(model))
    target = check_output_file(path, overwrite=overwrite)
    if quantization is not None and (not isinstance(quantization, str) or quantization not in QUANTIZATIONS):
        raise InputError(f"'{quantization}' is not a supported quantization; use one of {', '.join(QUANTIZATIONS)}")
    family, all_metadata = find_architecture(checkpoint.config, checkpoint.family)
    prefix = f"{family.name}."
    metadata = {key: value for key, value in all_metadata.items() if key.startswith(prefix) and value is not None}
    if checkpoint.tokenizer is not None:
        from cutaway.tokenizer import tokenizer_to_gguf

        metadata |= tokenizer_to_gguf(checkpoint.tokenizer)
        eos_token_ids = (checkpoint.generation_config or checkpoint.hf_config).get("eos_token_id")
        eos_token_ids = eos_token_ids if isinstance(eos_token_ids, list) else []
        other_ids = [i for i in eos_token_ids if i != metadata.get(_TOKEN_ID_KEY_FORMAT.format("eos"))]
        metadata |= dict(zip(map(_TOKEN_ID_KEY_FORMAT.format, _EOS_TOKEN_NAMES[1:]), other_ids, strict=False))
    tensors = [*export_weights(family, checkpoint.model), *_rope_factor_tensors(all_metadata)]
    write_gguf(target, family.name, metadata, tensors, quantization, overwrite=overwrite)
    return target


def check_output_file(path: str | Path, *, overwrite: bool) -> Path:
    """Return the path of a .gguf file to write, in an existing directory. Raise if it exists and is not overwritten."""
    target = resolve_output_path(path)
    if target.suffix != ".gguf":
        raise InputError(f"'{target}' does not end in .gguf; pass the path of a .gguf file")
    try:
        exists, is_file = target.exists() or target.is_symlink(), target.is_file()
    except OSError as error:
        raise InputError(f"'{target}' cannot be accessed: {error.strerror}") from None
    if exists and not (overwrite and is_file):
        raise InputError(f"'{target}' exists already; pass another path{', or overwrite=True' if is_file else ''}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    return target


def _rope_factor_tensors(metadata: Mapping[str, object]) -> Iterator[ExportedTensors]:
    for name in ROPE_TENSORS:
        if name in metadata:
            factors = torch.tensor(metadata[name])
            yield (name,), partial(list, [factors]), 0
