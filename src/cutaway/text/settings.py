"""What a directory says about its tokenizer beside the vocabulary: special tokens, flags, chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from cutaway.errors import InputError
from cutaway.text.files import MOST_TOKENS, exists, in_rust, read_object, read_text

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ChatTemplate = str | dict[str, str] | None
TEMPLATE_BYTES = 1 << 18


@dataclass
class Settings:
    """`tokenizer_config.json` and its neighbours, checked."""

    where: str = "the tokenizer"
    options: dict[str, Any] = field(default_factory=dict)
    """The other keys, to be asked with `flag` and `text`."""
    named: dict[str, str | AddedToken] = field(default_factory=dict)
    """By the names of NAMED; the directory's own words only, no class's defaults."""
    more: list[str | AddedToken] = field(default_factory=list)
    """Special tokens of the model's own kinds: image_token, extra_special_tokens by name."""
    extra: list[str | AddedToken] | None = None
    """extra_special_tokens, in older files additional_special_tokens, as a list."""
    added: dict[int, AddedToken] = field(default_factory=dict)
    chat_template: ChatTemplate = None

    def flag(self, key: str, default: bool) -> bool:
        value = self.options.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.where} sets {key} to {value!r:.60}; it must be true or false")
        return value

    def names(self, defaults: Mapping[str, str]) -> dict[str, str | AddedToken]:
        """The named special tokens, with a class's defaults where the directory is silent; a null is not silence.

        In the order of NAMED, since those that the vocabulary lacks get their ids in it.
        """
        silent = {name: token for name, token in defaults.items() if name not in self.options}
        every = {**silent, **self.named}
        return {name: every[name] for name in NAMED if name in every}

    def text(self, key: str) -> str | None:
        value = self.options.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.where} sets {key} to {value!r:.60}; it must be a string")
        return value

    @property
    def longest(self) -> int | None:
        """`model_max_length`; transformers writes 1e30 for 'unknown'."""
        value = self.options.get("model_max_length")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{self.where} sets model_max_length to {value!r:.60}; it must be a positive number")
        return int(value) if value < 1e18 else None


def settings_from_directory(directory: Path, tokenizer_json: dict[str, Any] | None = None) -> Settings:
    """The order of authority is transformers': added_tokens_decoder silences the older files beside it."""
    path = directory / "tokenizer_config.json"
    options = read_object(path) if exists(path) else {}
    where = str(path)
    settings = Settings(where, options)
    settings.chat_template = _chat_template(directory, options.pop("chat_template", None), where)
    decoder = options.pop("added_tokens_decoder", None)
    if decoder is not None:
        if not isinstance(decoder, dict):
            raise InputError(f"{where} has an added_tokens_decoder that is no object; get the file again")
        settings.added = {_index(key, where): _added(value, where) for key, value in decoder.items()}
    else:
        options |= _special_tokens_map(directory)
    extra = options.pop("extra_special_tokens", None) or options.pop("additional_special_tokens", None)
    others = {key: value for key, value in options.items() if key.endswith("_token") and key not in NAMED}
    own = [value for value in others.values() if isinstance(value, str | dict)]
    if isinstance(extra, dict):
        own, extra = [*own, *extra.values()], None
    settings.more = [_token(value, where) for value in own]
    if extra is not None:
        if not isinstance(extra, list):
            raise InputError(f"{where} has extra special tokens that are no list; get the file again")
        settings.extra = [_token(value, where) for value in extra]
    settings.named = {name: _token(options[name], where) for name in NAMED if options.get(name) is not None}
    if decoder is None:
        settings.added = _older_added_tokens(directory, settings) | _added_in(tokenizer_json, directory)
    flags = {token.content: token for token in settings.added.values()}
    settings.named = {name: flags.get(str_of(token), token) for name, token in settings.named.items()}
    return settings


def str_of(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _token(value: object, where: object) -> str | AddedToken:
    return value if isinstance(value, str) else _added(value, where, special=True)


def _added(value: object, where: object, special: bool | None = None) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{where} describes a token as {value!r:.80}; it must be a string or an object with content")
    flags = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in value}
    if any(not isinstance(flag, bool) for flag in flags.values()):
        raise InputError(f"{where} gives token {value['content']!r:.80} a flag that is not true or false; fix the file")
    if special is not None:
        flags["special"] = special
    return in_rust(where, lambda: AddedToken(value["content"], **flags))


def _index(key: str, where: object) -> int:
    if not key.isascii() or not key.isdigit() or int(key[:9]) != int(key) or int(key) >= MOST_TOKENS:
        raise InputError(
            f"{where} adds a token with the id {key!r:.40}, not a whole number below {MOST_TOKENS}; fix it"
        )
    return int(key)


def _special_tokens_map(directory: Path) -> dict[str, Any]:
    path = directory / "special_tokens_map.json"
    return read_object(path) if exists(path) else {}


def _older_added_tokens(directory: Path, settings: Settings) -> dict[int, AddedToken]:
    path = directory / "added_tokens.json"
    if not exists(path):
        return {}
    special = {str_of(token) for token in [*settings.named.values(), *settings.more, *(settings.extra or [])]}
    tokens = {}
    for content, number in read_object(path).items():
        known = content in special
        tokens[_index(str(number), path)] = AddedToken(content, normalized=not known, special=known)
    return tokens


def _added_in(tokenizer_json: dict[str, Any] | None, directory: Path) -> dict[int, AddedToken]:
    where = directory / "tokenizer.json"
    values = (tokenizer_json or {}).get("added_tokens") or []
    if not isinstance(values, list) or any(not isinstance(value, dict) for value in values):
        raise InputError(f"{where} has added_tokens that are no list of objects; get the file again")
    return {_index(str(value.get("id")), where): _added(value, where) for value in values}


def _chat_template(directory: Path, inline: object, where: str) -> ChatTemplate:
    """Files of their own come before the key in tokenizer_config.json, which may be a list of named ones."""
    single, folder = directory / "chat_template.jinja", directory / "additional_chat_templates"
    files = {"default": single} if exists(single) else {}
    if folder.is_dir():
        files |= {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    templates = {name: read_text(path, TEMPLATE_BYTES) for name, path in files.items()}
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    if inline is None or isinstance(inline, str):
        return inline
    if isinstance(inline, list):
        named = [entry for entry in inline if isinstance(entry, dict)]
        inline = {entry.get("name"): entry.get("template") for entry in named} if len(named) == len(inline) else None
    if not isinstance(inline, dict) or any(not isinstance(part, str) for pair in inline.items() for part in pair):
        raise InputError(f"{where} has a chat_template that is neither a string nor named strings; fix the file")
    return inline
