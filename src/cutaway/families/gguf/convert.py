"""A checkpoint from a GGUF file, and a GGUF file from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutaway.config import Config, to_dict
from cutaway.config import config as read_config
from cutaway.errors import ConfigError, InputError, WeightError
from cutaway.families.checkpoint import Checkpoint
from cutaway.families.family import Family
from cutaway.families.fill import fill_model
from cutaway.families.gguf.file import PACKINGS, Gguf, write_gguf
from cutaway.families.gguf.rope import FREQUENCIES, LONG, SHORT
from cutaway.families.gguf.tables import ARCHITECTURES
from cutaway.families.save import check_values, exported, where_to
from cutaway.model import Transformer

if TYPE_CHECKING:
    from cutaway.text import Tokenizer

TOKENS = {"bos": "bos_token_id", "padding": "pad_token_id"}
KEY = "tokenizer.ggml.{}_token_id"
ENDS = ("eos", "eot", "eom")
"""What ends a text, a turn of a chat, and a message that waits for a tool."""
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
"""Most files of chat models name the end of a text only; llama.cpp knows the ends of turns by their looks, too."""


def load_gguf(path: Path, **how: Any) -> Checkpoint:
    """Open a GGUF file: packed numbers are unpacked, settings become a configuration."""
    file = Gguf(path)
    arch = file.settings.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ConfigError(f"'{path.name}' is of architecture {arch!r}; cutaway opens {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[arch]
    theirs = {key: value for key, value in file.settings.items() if key.startswith(f"{arch}.")}
    if "token_embd.weight" in file.entries:
        theirs.setdefault(f"{arch}.vocab_size", file.entries["token_embd.weight"].shape[0])
    for name in (FREQUENCIES, LONG, SHORT):
        if name in file.entries:
            if file.entries[name].numel > 4096:
                raise WeightError(f"tensor '{name}' has {file.entries[name].numel:,} factors, more than any head")
            theirs[name] = [float(f"{value:.7g}") for value in file.read(name).flatten().tolist()]
    _all_known(family, theirs)
    model, config, report = fill_model(family, theirs, file, source=str(path), **how)
    ids = {ours: file.settings.get(KEY.format(name)) for name, ours in TOKENS.items()} | {"eos_token_id": _ends(file)}
    return Checkpoint(
        model,
        config,
        family.architecture,
        report,
        generation={key: value for key, value in ids.items() if value is not None},
        read_tokenizer=lambda: _tokenizer(file),
    )


def _all_known(family: Family, theirs: dict[str, Any]) -> None:
    """A setting of the architecture that no field reads would be another model."""
    known = {key for entry in family.fields for key in entry.keys} | family.harmless.keys()
    strange = sorted(theirs.keys() - known)
    if strange:
        raise ConfigError(f"its setting '{strange[0]}' ({theirs[strange[0]]!r}) is none that cutaway honours")


def _ends(file: Gguf) -> Any:
    """The id that ends an answer, or all of them."""
    found = [file.settings.get(KEY.format(name)) for name in ENDS]
    tokens = file.settings.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and found[1] is None:
        found += [tokens.index(end) for end in TURN_ENDS if end in tokens]
    several = [each for place, each in enumerate(found) if each is not None and each not in found[:place]]
    return several if len(several) > 1 else next(iter(several), None)


def _tokenizer(file: Gguf) -> "Tokenizer | None":
    from cutaway.text import tokenizer_from_gguf

    fields = {key: value for key, value in file.settings.items() if key.startswith("tokenizer.")}
    return tokenizer_from_gguf(fields) if fields else None


def describe(config: Config, first: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The architecture that can describe a configuration (its own family's, if that can), and its settings.

    The format is for running models, not training them: it has no word for dropout.
    """
    if config.form != "decoder":
        raise ConfigError(
            f"this is a model of form '{config.form}', and only decoders are written as GGUF; use --to hf"
        )
    config = read_config(_undropped(to_dict(config)))
    refusals = []
    for family in sorted(ARCHITECTURES.values(), key=lambda family: family.architecture != first):
        try:
            return family, family.write(config)
        except ConfigError as error:
            refusals.append(str(error))
    raise ConfigError(f"no GGUF architecture can describe this model. {min(refusals, key=len)}")


def _undropped(value: Any) -> Any:
    if isinstance(value, list):
        return [_undropped(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _undropped(item) for key, item in value.items() if not key.endswith("dropout")}


def save_gguf(checkpoint: Checkpoint, path: str | Path, *, packing: str | None = None, overwrite: bool = False) -> Path:
    """Write one GGUF file. Matrices keep their dtype, or are packed as asked."""
    if isinstance(checkpoint, Transformer):
        checkpoint = Checkpoint(checkpoint, checkpoint.config)
    if not isinstance(checkpoint, Checkpoint):
        raise InputError(f"a {type(checkpoint).__name__} cannot be saved; give a Checkpoint or a model")
    target = where_to(path)
    if target.suffix != ".gguf":
        raise InputError(f"'{target}' should end in .gguf: one file is written")
    check_values(checkpoint.model)
    try:
        there, plain = target.exists() or target.is_symlink(), target.is_file()
    except OSError as error:
        raise InputError(f"'{target}' cannot be looked at: {error.strerror}") from None
    if there and not (overwrite and plain):
        raise InputError(f"'{target}' exists already; name another file{' or overwrite it' if plain else ''}")
    if packing is not None and (not isinstance(packing, str) or packing not in PACKINGS):
        raise InputError(f"'{packing}' is no packing that can be written; use one of {', '.join(PACKINGS)}")
    family, theirs = describe(checkpoint.config, checkpoint.family)
    settings = {key: value for key, value in theirs.items() if key.startswith(f"{family.name}.") and value is not None}
    if checkpoint.tokenizer is not None:
        from cutaway.text import tokenizer_to_gguf

        settings |= tokenizer_to_gguf(checkpoint.tokenizer)
        ends = (checkpoint.generation or checkpoint.theirs).get("eos_token_id")
        others = [each for each in (ends if isinstance(ends, list) else []) if each != settings.get(KEY.format("eos"))]
        settings |= dict(zip(map(KEY.format, ENDS[1:]), others, strict=False))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightError(f"'{target}' could not be written: {error}") from None
    tensors = [*exported(family, checkpoint.model), *_factors(theirs)]
    write_gguf(target, family.name, settings, tensors, packing, overwrite=overwrite)
    return target


def _factors(theirs: dict[str, Any]) -> list[Any]:
    import torch

    found = [(name, torch.tensor(theirs[name])) for name in (FREQUENCIES, LONG, SHORT) if name in theirs]
    return [((name,), lambda tensor=tensor: [tensor], 0) for name, tensor in found]
