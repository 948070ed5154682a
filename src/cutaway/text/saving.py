"""Writing a tokenizer as files that transformers opens: all of them, or none."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from cutaway.errors import InputError

if TYPE_CHECKING:
    from cutaway.text.tokenizer import Tokenizer

TEMPLATE = "chat_template.jinja"


def saved_files(tokenizer: "Tokenizer") -> dict[str, bytes]:
    """tokenizer.json holds the whole pipeline, so the class is the one that takes it as it stands."""
    named = set(tokenizer.named.values())
    added = sorted(tokenizer.backend.get_added_tokens_decoder().items())
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.model_max_length or int(1e30),
        "padding_side": tokenizer.padding_side,
        "clean_up_tokenization_spaces": tokenizer.tidy,
        "split_special_tokens": tokenizer.backend.encode_special_tokens,
        "additional_special_tokens": [t.content for _, t in added if t.special and t.content not in named],
        # Without this, special_tokens_map.json and added_tokens.json from earlier days would have a say.
        "added_tokens_decoder": {str(number): _flags(token) for number, token in added},
        **tokenizer.named,
    }
    files = {"tokenizer.json": tokenizer.backend.to_str(pretty=True).encode()}
    return files | config_files(tokenizer, config)


def _flags(token: AddedToken) -> dict[str, object]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def config_files(tokenizer: "Tokenizer", config: dict[str, object]) -> dict[str, bytes]:
    files = {}
    if isinstance(tokenizer.chat_template, str):
        files[TEMPLATE] = tokenizer.chat_template.encode()
    elif tokenizer.chat_template is not None:
        # In the config, since names need not be fit for files.
        config["chat_template"] = [{"name": n, "template": t} for n, t in tokenizer.chat_template.items()]
    return {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode(), **files}


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Each beside its place first, and moved there when all are whole on the disk."""
    staged: list[tuple[Path, Path]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
            staged.append((Path(temporary), directory / name))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(temporary).chmod(0o666 & ~mask)
        for temporary_path, final in staged:
            temporary_path.replace(final)
        if TEMPLATE not in files:
            (directory / TEMPLATE).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"the tokenizer cannot be written to {directory} ({error}); give another directory") from error
    finally:
        for temporary_path, _ in staged:
            temporary_path.unlink(missing_ok=True)
