"""A checkpoint from a GGUF file, and a GGUF file from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.gguf.architectures import GGUF_ARCHITECTURES
from cutaway.families.gguf.file import GGML_TYPES, GGUFFile, write_gguf
from cutaway.families.gguf.rope_fields import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS
from cutaway.families.save import check_not_on_meta, export_weights, resolve_output_path
from cutaway.families.weight_loader import load_model
from cutaway.model import Transformer

if TYPE_CHECKING:
    from cutaway.tokenizer import Tokenizer

TOKEN_ID_NAMES = {"bos": "bos_token_id", "padding": "pad_token_id"}
TOKEN_ID_KEY_FORMAT = "tokenizer.ggml.{}_token_id"
EOS_TOKEN_NAMES = ("eos", "eot", "eom")
"""What ends a text, a turn of a chat, and a message that waits for a tool."""
END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Most files of chat models name the end of a text only; llama.cpp knows the ends of turns by their looks, too."""


def load_gguf(path: Path, **load_options: Any) -> Checkpoint:
    """Open a GGUF file: packed numbers are unpacked, settings become a configuration."""
    file = GGUFFile(path)
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in GGUF_ARCHITECTURES:
        raise ConfigError(f"'{path.name}' is of architecture {arch!r}; cutaway opens {', '.join(GGUF_ARCHITECTURES)}")
    family = GGUF_ARCHITECTURES[arch]
    metadata = {key: value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" in file.tensor_infos:
        metadata.setdefault(f"{arch}.vocab_size", file.tensor_infos["token_embd.weight"].shape[0])
    for name in (ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT):
        if name in file.tensor_infos:
            if file.tensor_infos[name].numel > 4096:
                raise WeightError(f"tensor '{name}' has {file.tensor_infos[name].numel:,} factors, more than any head")
            metadata[name] = [float(f"{value:.7g}") for value in file.read_tensor(name).flatten().tolist()]
    _check_known_keys(family, metadata)
    model, config, report = load_model(family, metadata, file, source=str(path), **load_options)
    ids = {key: file.metadata.get(TOKEN_ID_KEY_FORMAT.format(name)) for name, key in TOKEN_ID_NAMES.items()} | {
        "eos_token_id": _eos_token_ids(file)
    }
    return Checkpoint(
        model,
        config,
        family.architecture,
        report,
        generation_config={key: value for key, value in ids.items() if value is not None},
        tokenizer_loader=lambda: _load_tokenizer(file),
    )


def _check_known_keys(family: Family, metadata: dict[str, Any]) -> None:
    """A setting of the architecture that no field reads would be another model."""
    known = {key for entry in family.fields for key in entry.keys} | family.ignored_config_keys.keys()
    strange = sorted(metadata.keys() - known)
    if strange:
        raise ConfigError(f"its setting '{strange[0]}' ({metadata[strange[0]]!r}) is none that cutaway honours")


def _eos_token_ids(gguf_file: GGUFFile) -> Any:
    """The id that ends an answer, or all of them."""
    found = [gguf_file.metadata.get(TOKEN_ID_KEY_FORMAT.format(name)) for name in EOS_TOKEN_NAMES]
    tokens = gguf_file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and found[1] is None:
        found += [tokens.index(end) for end in END_OF_TURN_TOKENS if end in tokens]
    several = [each for place, each in enumerate(found) if each is not None and each not in found[:place]]
    return several if len(several) > 1 else next(iter(several), None)


def _load_tokenizer(gguf_file: GGUFFile) -> "Tokenizer | None":
    from cutaway.tokenizer import tokenizer_from_gguf

    fields = {key: value for key, value in gguf_file.metadata.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf(fields) if fields else None


def find_architecture(config: Config, preferred: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The architecture that can describe a configuration (its own family's, if that can), and its settings.

    The format is for running models, not training them: it has no word for dropout.
    """
    if config.form != "decoder":
        raise ConfigError(
            f"this is a model of form '{config.form}', and only decoders are written as GGUF; use --to hf"
        )
    config = read_config(_without_dropout(to_dict(config)))
    refusals = []
    for family in sorted(GGUF_ARCHITECTURES.values(), key=lambda family: family.architecture != preferred):
        try:
            return family, family.config_to_hf(config)
        except ConfigError as error:
            refusals.append(str(error))
    raise ConfigError(f"no GGUF architecture can describe this model. {min(refusals, key=len)}")


def _without_dropout(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_dropout(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_dropout(item) for key, item in value.items() if not key.endswith("dropout")}


def save_gguf(
    checkpoint: Checkpoint, path: str | Path, *, quantization: str | None = None, overwrite: bool = False
) -> Path:
    """Write one GGUF file. Matrices keep their dtype, or are packed as asked."""
    if isinstance(checkpoint, Transformer):
        checkpoint = Checkpoint(checkpoint, checkpoint.config)
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(f"a {type(checkpoint).__name__} cannot be saved; give a Checkpoint or a model")
    target = resolve_output_path(path)
    if target.suffix != ".gguf":
        raise InputError(f"'{target}' should end in .gguf: one file is written")
    check_not_on_meta(checkpoint.model)
    try:
        there, plain = target.exists() or target.is_symlink(), target.is_file()
    except OSError as error:
        raise InputError(f"'{target}' cannot be looked at: {error.strerror}") from None
    if there and not (overwrite and plain):
        raise InputError(f"'{target}' exists already; name another file{' or overwrite it' if plain else ''}")
    if quantization is not None and (not isinstance(quantization, str) or quantization not in GGML_TYPES):
        raise InputError(f"'{quantization}' is no quantization that can be written; use one of {', '.join(GGML_TYPES)}")
    family, settings = find_architecture(checkpoint.config, checkpoint.family)
    metadata = {
        key: value for key, value in settings.items() if key.startswith(f"{family.name}.") and value is not None
    }
    if checkpoint.tokenizer is not None:
        from cutaway.tokenizer import tokenizer_to_gguf

        metadata |= tokenizer_to_gguf(checkpoint.tokenizer)
        ends = (checkpoint.generation_config or checkpoint.hf_config).get("eos_token_id")
        others = [
            each
            for each in (ends if isinstance(ends, list) else [])
            if each != metadata.get(TOKEN_ID_KEY_FORMAT.format("eos"))
        ]
        metadata |= dict(zip(map(TOKEN_ID_KEY_FORMAT.format, EOS_TOKEN_NAMES[1:]), others, strict=False))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    tensors = [*export_weights(family, checkpoint.model), *_rope_factor_tensors(settings)]
    write_gguf(target, family.name, metadata, tensors, quantization, overwrite=overwrite)
    return target


def _rope_factor_tensors(metadata: dict[str, Any]) -> list[Any]:
    import torch

    found = [
        (name, torch.tensor(metadata[name]))
        for name in (ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT)
        if name in metadata
    ]
    return [((name,), lambda tensor=tensor: [tensor], 0) for name, tensor in found]
