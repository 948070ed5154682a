"""TokenizerConfig: tokenizer_config.json, special_tokens_map.json, added_tokens.json and chat templates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken

from cutaway.errors import InputError
from cutaway.tokenizer import file_io
from cutaway.tokenizer.file_io import JsonObject, path_exists, read_json_object, read_text

SPECIAL_TOKENS_ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ChatTemplate = str | dict[str, str] | None
_MAX_CHAT_TEMPLATE_BYTES = 1 << 18


@dataclass
class TokenizerConfig:
    """Validated contents of tokenizer_config.json and related files."""

    source: str = "the tokenizer"
    options: JsonObject = field(default_factory=dict)
    """Other keys, read with `get_bool` and `get_str`."""
    special_tokens: dict[str, str | AddedToken] = field(default_factory=dict)
    """Tokens of SPECIAL_TOKENS_ATTRIBUTES that the directory sets, without the defaults of the class."""
    model_specific_special_tokens: list[str | AddedToken] = field(default_factory=list)
    """Model-specific special tokens: image_token and the like, and extra_special_tokens if it is an object."""
    extra_special_tokens: list[str | AddedToken] | None = None
    """extra_special_tokens (additional_special_tokens in older files) if it is a list."""
    added_tokens_decoder: dict[int, AddedToken] = field(default_factory=dict)
    chat_template: ChatTemplate = None

    def get_bool(self, key: str, default: bool) -> bool:
        """Boolean at a key of `options`, or `default` if it is absent or null. Raises for other types."""
        value = self.options.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.source} sets {key} to {value!r:.60}; it must be true or false")
        return value

    def resolve_special_tokens(self, default_special_tokens: Mapping[str, str]) -> dict[str, str | AddedToken]:
        """Special tokens of the directory, with the class defaults for absent keys. A key that is null gets no default.

        The order is that of SPECIAL_TOKENS_ATTRIBUTES: tokens missing from the vocabulary get their ids in this order.
        """
        defaults = {name: token for name, token in default_special_tokens.items() if name not in self.options}
        tokens = {**defaults, **self.special_tokens}
        return {name: tokens[name] for name in SPECIAL_TOKENS_ATTRIBUTES if name in tokens}

    def get_str(self, key: str) -> str | None:
        """String at a key of `options`, or None if it is absent or null. Raises for other types."""
        value = self.options.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.source} sets {key} to {value!r:.60}; it must be a string")
        return value

    @property
    def model_max_length(self) -> int | None:
        """`model_max_length` of the file. None if it is absent or ≥ 1e18: transformers writes 1e30 for 'no limit'."""
        value = self.options.get("model_max_length")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{self.source} sets model_max_length to {value!r:.60}; it must be a positive number")
        return int(value) if value < 1e18 else None


def load_tokenizer_config(directory: Path, tokenizer_json: JsonObject | None = None) -> TokenizerConfig:
    """Load tokenizer_config.json and the chat template.

    Without added_tokens_decoder, special tokens are also read from special_tokens_map.json, and added tokens from
    added_tokens.json and tokenizer.json, as in transformers.
    """
    path = directory / "tokenizer_config.json"
    options = read_json_object(path) if path_exists(path) else {}
    source = str(path)
    cfg = TokenizerConfig(source, options)
    cfg.chat_template = _load_chat_template(directory, options.pop("chat_template", None), source)
    decoder = options.pop("added_tokens_decoder", None)
    if decoder is not None:
        if not isinstance(decoder, dict):
            raise InputError(f"{source} has an added_tokens_decoder that is not an object; download the file again")
        cfg.added_tokens_decoder = {
            _parse_token_id(key, source): _parse_added_token(value, source) for key, value in decoder.items()
        }
    elif path_exists(directory / "special_tokens_map.json"):
        options |= read_json_object(directory / "special_tokens_map.json")
    extra = options.pop("extra_special_tokens", None) or options.pop("additional_special_tokens", None)
    others = [key for key in options if key.endswith("_token") and key not in SPECIAL_TOKENS_ATTRIBUTES]
    model_specific = [options[key] for key in others if isinstance(options[key], str | dict)]
    if isinstance(extra, dict):
        model_specific, extra = [*model_specific, *extra.values()], None
    cfg.model_specific_special_tokens = [_parse_token(value, source) for value in model_specific]
    if extra is not None:
        if not isinstance(extra, list):
            raise InputError(f"{source} has extra special tokens that are not a list; download the file again")
        cfg.extra_special_tokens = [_parse_token(value, source) for value in extra]
    names = [name for name in SPECIAL_TOKENS_ATTRIBUTES if options.get(name) is not None]
    cfg.special_tokens = {name: _parse_token(options[name], source) for name in names}
    if decoder is None:
        added = _read_added_tokens_json(directory, cfg)
        cfg.added_tokens_decoder = added | _added_tokens_in(tokenizer_json, directory)
    flags = {token.content: token for token in cfg.added_tokens_decoder.values()}
    cfg.special_tokens = {name: flags.get(token_content(token), token) for name, token in cfg.special_tokens.items()}
    return cfg


def added_token_to_dict(token: AddedToken) -> dict[str, str | bool]:
    return {name: getattr(token, name) for name in ("content", *_FLAGS)}


def as_special(token: str | AddedToken) -> AddedToken:
    """Copy of a token with special=True."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags: dict[str, bool] = {name: getattr(token, name) for name in _FLAGS}
    return AddedToken(token.content, **flags | {"special": True})


def token_content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _parse_token(value: object, source: object) -> str | AddedToken:
    return value if isinstance(value, str) else _parse_added_token(value, source, special=True)


def _parse_added_token(value: object, source: object, special: bool | None = None) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{source} has the token {value!r:.80}; it must be a string or an object with content")
    flags = {key: value[key] for key in _FLAGS if key in value}
    if any(not isinstance(flag, bool) for flag in flags.values()):
        raise InputError(f"{source}: a flag of token {value['content']!r:.80} is not true or false; fix the file")
    if special is not None:
        flags["special"] = special
    return file_io.wrap_tokenizers_errors(source, lambda: AddedToken(value["content"], **flags))


def _parse_token_id(key: str, source: object) -> int:
    if not key.isascii() or not key.isdigit() or int(key[:9]) != int(key) or int(key) >= file_io.MAX_VOCAB_SIZE:
        raise InputError(
            f"{source} adds a token with id {key!r:.40}, not an integer below {file_io.MAX_VOCAB_SIZE}; fix it"
        )
    return int(key)


def _read_added_tokens_json(directory: Path, cfg: TokenizerConfig) -> dict[int, AddedToken]:
    path = directory / "added_tokens.json"
    if not path_exists(path):
        return {}
    special = [*cfg.special_tokens.values(), *cfg.model_specific_special_tokens]
    special += cfg.extra_special_tokens or []
    contents = {token_content(token) for token in special}
    tokens = {}
    for content, token_id in read_json_object(path).items():
        token = AddedToken(content, normalized=content not in contents, special=content in contents)
        tokens[_parse_token_id(str(token_id), path)] = token
    return tokens


def _added_tokens_in(tokenizer_json: JsonObject | None, directory: Path) -> dict[int, AddedToken]:
    path = directory / "tokenizer.json"
    values = (tokenizer_json or {}).get("added_tokens") or []
    if not isinstance(values, list) or any(not isinstance(value, dict) for value in values):
        raise InputError(f"{path} has added_tokens that are not a list of objects; download the file again")
    return {_parse_token_id(str(value.get("id")), path): _parse_added_token(value, path) for value in values}


def _load_chat_template(directory: Path, inline: object, source: str) -> ChatTemplate:
    """Load the chat template from template files, else from tokenizer_config.json, which may list several by name."""
    single, folder = directory / file_io.CHAT_TEMPLATE_FILE, directory / "additional_chat_templates"
    files = {"default": single} if path_exists(single) else {}
    if folder.is_dir():
        files |= {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    templates = {name: read_text(path, max_bytes=_MAX_CHAT_TEMPLATE_BYTES) for name, path in files.items()}
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    if inline is None or isinstance(inline, str):
        return inline
    if isinstance(inline, list):
        named = [entry for entry in inline if isinstance(entry, dict)]
        inline = {entry.get("name"): entry.get("template") for entry in named} if len(named) == len(inline) else None
    if not isinstance(inline, dict) or any(not isinstance(part, str) for pair in inline.items() for part in pair):
        raise InputError(f"{source} has a chat_template that is neither a string nor named strings; fix the file")
    return inline
