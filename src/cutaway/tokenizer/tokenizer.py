"""Tokenizer: encode, decode, special tokens, chat templates and saving."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import index
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import tokenizers

from cutaway.errors import InputError
from cutaway.tokenizer.chat.template import Message, render_chat_template
from cutaway.tokenizer.decode_stream import DecodeStream
from cutaway.tokenizer.file_io import CHAT_TEMPLATE_FILE, wrap_tokenizers_errors, write_files_atomically
from cutaway.tokenizer.split_patterns import bytes_to_unicode
from cutaway.tokenizer.tokenizer_config import SPECIAL_TOKENS_ATTRIBUTES, ChatTemplate, added_token_to_dict


def serialize_config(tokenizer: "Tokenizer", config: Mapping[str, object]) -> dict[str, bytes]:
    """Return {file name: content} of tokenizer_config.json, which has the keys `config`, and of the chat template."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        # Several templates are written to tokenizer_config.json, because their names need not be valid file names.
        config = {**config, "chat_template": [{"name": n, "template": t} for n, t in template.items()]}
    files = {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}
    return files | {CHAT_TEMPLATE_FILE: template.encode()} if isinstance(template, str) else files


_wrap_errors = partial(wrap_tokenizers_errors, advice="check it and the tokenizer files")
# Applied in this order, each to the whole text, as in transformers.
_CLEAN_UP_REPLACEMENTS = [(f" {mark}", mark) for mark in (".", "?", "!", ",")]
_CLEAN_UP_REPLACEMENTS += [(" ' ", "'"), *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re"))]


class Tokenizer:
    """Encodes text, decodes token ids. See `load_tokenizer`, `tokenizer_from_gguf`, `byte_tokenizer`, `train_bpe`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens_map: Mapping[str, str] | None = None,
        chat_template: ChatTemplate = None,
        model_max_length: int | None = None,
        padding_side: Literal["left", "right"] = "right",
        clean_up_tokenization_spaces: bool = False,
        split_special_tokens: bool = False,
    ) -> None:
        """`special_tokens_map`: bos_token, eos_token and so on → the text of the token."""
        if unknown := set(special_tokens_map or ()) - set(SPECIAL_TOKENS_ATTRIBUTES):
            known = ", ".join(SPECIAL_TOKENS_ATTRIBUTES)
            raise InputError(f"special_tokens_map has the unknown keys {', '.join(unknown)}; use {known}")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = split_special_tokens
        self.backend = backend
        self.special_tokens_map = dict(special_tokens_map or {})
        self.chat_template = chat_template
        self.model_max_length = model_max_length
        self.padding_side = padding_side
        # As in transformers, there is no clean-up for BPE, because it would remove spaces of the text.
        self.clean_up_tokenization_spaces = clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
        added = backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        self.decode_skip_ids = frozenset(special_ids)
        """Ids that `decode` skips. `all_special_ids` also has the ids of `special_tokens_map`."""
        named_ids = {name: self.token_to_id(token) for name, token in self.special_tokens_map.items()}
        self.all_special_ids = frozenset(special_ids | {i for i in named_ids.values() if i is not None})
        self.bos_token_id, self.eos_token_id = named_ids.get("bos_token"), named_ids.get("eos_token")
        self.pad_token_id, self.unk_token_id = named_ids.get("pad_token"), named_ids.get("unk_token")
        self.mask_token_id = named_ids.get("mask_token")

    # Encoding and decoding

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens of the model (BOS, EOS, CLS …) if `add_special_tokens`.

        The text of a special token is encoded as that token, unless `split_special_tokens` is set.
        """
        return _wrap_errors("this text", lambda: self._encode(validate_text(text), add_special_tokens))

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts in parallel, without padding."""
        if isinstance(texts, str):
            raise InputError("encode_batch takes a list of strings; for one text use encode")
        checked = [validate_text(text) for text in texts]
        return _wrap_errors("one of these texts", lambda: self._encode_batch(checked, add_special_tokens))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids without a token are skipped, because a model's vocabulary may be padded."""
        text = _wrap_errors("these ids", lambda: self._decode([*map(_validate_token_id, ids)], skip_special_tokens))
        if self.clean_up_tokenization_spaces:
            for old, new in _CLEAN_UP_REPLACEMENTS:
                text = text.replace(old, new)
        return text

    def decode_stream(self, *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] = ()) -> DecodeStream:
        """Return an incremental decoder of generated token ids, which continue the prompt `prefix_ids`."""
        return DecodeStream(self, skip_special_tokens=skip_special_tokens, prefix_ids=prefix_ids)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    # Vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as written in the vocabulary, or None if no token has this id."""
        return self.backend.id_to_token(_validate_token_id(token_id))

    def format_token(self, token_id: int) -> str | None:
        """Text of a token for display, or None if no token has this id.

        A token that is only a part of a character is shown as bytes: <0xF0 0x9F>.
        """
        text, name = self.decode([token_id], skip_special_tokens=False), self.id_to_token(token_id)
        if name is None or (text and "\ufffd" not in text):
            return text or name
        byte_of_char = {character: byte for byte, character in bytes_to_unicode().items()}
        if not text or not set(name) <= byte_of_char.keys():
            return name
        return f"<{' '.join(f'0x{byte_of_char[character]:02X}' for character in name)}>"

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as written in the vocabulary, or None if it is not in the vocabulary."""
        return self.backend.token_to_id(token)

    # Chat templates

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        **template_kwargs: object,
    ) -> str:
        """Render messages to a prompt. `chat_template` is a template, or the name of a template of this tokenizer."""
        source = self.select_chat_template(chat_template, with_tools=tools is not None)
        values = {**self.special_tokens_map, **template_kwargs, "tools": tools}
        return render_chat_template(source, messages, {**values, "add_generation_prompt": add_generation_prompt})

    def encode_chat(self, messages: Sequence[Message], **render_options: Any) -> list[int]:
        """Token ids of `render_chat`. No special tokens are added, because the template includes BOS if required."""
        return self.encode(self.render_chat(messages, **render_options), add_special_tokens=False)

    def select_chat_template(self, chat_template: str | None, *, with_tools: bool) -> str:
        templates = self.chat_template
        if isinstance(templates, dict):
            if chat_template is None:
                chat_template = "tool_use" if with_tools and "tool_use" in templates else "default"
                if chat_template not in templates:
                    raise InputError(f"this tokenizer has no default chat template; pass one of {', '.join(templates)}")
            return templates.get(chat_template, chat_template)
        source = templates if chat_template is None else chat_template
        if source is None:
            raise InputError("this tokenizer has no chat template; pass chat_template, or use encode for plain text")
        return source

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Save the tokenizer in the format of transformers (AutoTokenizer), all files or none."""
        write_files_atomically(Path(directory), self._serialize_files())

    def _serialize_files(self) -> dict[str, bytes]:
        """Return {file name: content}. The saved class is PreTrainedTokenizerFast, which uses tokenizer.json as is."""
        named_tokens = set(self.special_tokens_map.values())
        added = sorted(self.backend.get_added_tokens_decoder().items())
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.model_max_length or int(1e30),
            "padding_side": self.padding_side,
            "clean_up_tokenization_spaces": self.clean_up_tokenization_spaces,
            "split_special_tokens": self.backend.encode_special_tokens,
            "additional_special_tokens": [t.content for _, t in added if t.special and t.content not in named_tokens],
            # If absent, transformers would read old special_tokens_map.json and added_tokens.json files instead.
            "added_tokens_decoder": {str(token_id): added_token_to_dict(token) for token_id, token in added},
            **self.special_tokens_map,
        }
        return {"tokenizer.json": self.backend.to_str(pretty=True).encode(), **serialize_config(self, config)}

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.backend.model).__name__}, {self.vocab_size} tokens)"


def validate_text(text: object) -> str:
    """Return a text that can be encoded. Raises InputError for other types and for unpaired surrogates."""
    if not isinstance(text, str):
        raise InputError(f"text has type {type(text).__name__}, not str; use encode_batch for several texts")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text has an unpaired surrogate at character {error.start}; remove it") from error
    return text


def _validate_token_id(value: SupportsIndex) -> int:
    try:
        token_id = index(value)
    except TypeError as error:
        raise InputError(f"a token id is {value!r:.40}; pass an integer") from error
    if not 0 <= token_id < 1 << 32:
        raise InputError(f"a token id is {token_id}; pass an integer from 0 to 2^32 - 1")
    return token_id
