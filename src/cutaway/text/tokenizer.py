"""`Tokenizer`: text to ids and back, with what a model's directory says about special tokens and chats."""

import os
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Literal

import tokenizers

from cutaway.errors import InputError
from cutaway.text.chat import render
from cutaway.text.files import in_rust
from cutaway.text.saving import saved_files, write_files
from cutaway.text.settings import NAMED, ChatTemplate
from cutaway.text.splits import byte_characters
from cutaway.text.stream import Stream

# In this order, each over the whole text, as transformers does it.
_TIDIED = [(f" {mark}", mark) for mark in (".", "?", "!", ",")]
_TIDIED += [(" ' ", "'"), *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re"))]


class Tokenizer:
    """Text to ids and back; see `tokenizer_from_directory`, `tokenizer_from_gguf`, `byte_tokenizer`, `train_bpe`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        chat_template: ChatTemplate = None,
        model_max_length: int | None = None,
        padding_side: Literal["left", "right"] = "right",
        tidy: bool = False,
        split_special: bool = False,
    ) -> None:
        """`named` gives the contents of bos_token, eos_token and so on; `tidy` is clean_up_tokenization_spaces."""
        if named and not named.keys() <= set(NAMED):
            raise InputError(f"special tokens are named {', '.join(NAMED)}; not {', '.join(set(named) - set(NAMED))}")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = split_special
        self.backend = backend
        self.named = dict(named or {})
        self.chat_template = chat_template
        self.model_max_length = model_max_length
        self.padding_side = padding_side
        # transformers tidies for no BPE either: it would take spaces away that the text had.
        self.tidy = tidy and type(backend.model).__name__ != "BPE"
        added = backend.get_added_tokens_decoder()
        marked = {number for number, token in added.items() if token.special}
        self.skipped_ids = frozenset(marked)
        """What `decode` passes over; with the named tokens, `special_ids`."""
        self.special_ids = frozenset(marked | {n for t in self.named.values() if (n := self.id(t)) is not None})

    # Text to ids and back

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add BOS, EOS, CLS and the like, as the directory says. Those in the text are read in any case."""
        return in_rust("this text", lambda: self._encode(_whole(text), special))

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Each as by `encode`, side by side; nothing is padded."""
        if isinstance(texts, str):
            raise InputError("encode_batch takes several strings; for one text use encode")
        whole = [_whole(text) for text in texts]
        return in_rust("one of these texts", lambda: self._encode_batch(whole, special))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Ids without a token are passed over: a model's vocabulary may be padded beyond its tokenizer's."""
        text = in_rust("these ids", lambda: self._decode([_id(number) for number in ids], skip_special))
        if self.tidy:
            for messy, clean in _TIDIED:
                text = text.replace(messy, clean)
        return text

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> Stream:
        """Decodes ids one by one as they are generated, as what follows the ids in `after`."""
        return Stream(self, skip_special=skip_special, after=after)

    def _encode(self, text: str, special: bool) -> list[int]:
        return self.backend.encode(text, add_special_tokens=special).ids

    def _encode_batch(self, texts: list[str], special: bool) -> list[list[int]]:
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=special)]

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """Tokens, the added ones among them."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token(self, number: int) -> str | None:
        return in_rust("this id", lambda: self.backend.id_to_token(_id(number)))

    def spelled(self, number: int) -> str | None:
        """A token's text. What is only a part of a character has none, and is told byte by byte: <0xF0 0x9F>."""
        text, name = self.decode([number], skip_special=False), self.token(number)
        if name is None or (text and "\ufffd" not in text):
            return text or name
        bytes_of = {character: byte for byte, character in byte_characters().items()}
        if not text or not set(name) <= bytes_of.keys():
            return name
        return f"<{' '.join(f'0x{bytes_of[character]:02X}' for character in name)}>"

    def id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def unk_id(self) -> int | None:
        return self._named_id("unk_token")

    @property
    def mask_id(self) -> int | None:
        return self._named_id("mask_token")

    def _named_id(self, name: str) -> int | None:
        return self.id(self.named[name]) if name in self.named else None

    # Chats

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **extra: Any,
    ) -> str:
        """The prompt that the chat template writes. `template`: another template, or the name of one of several."""
        source = self._template(template, with_tools=tools is not None)
        values = {**self.named, **extra, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return render(source, messages, values)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`render_chat` as ids. The template itself writes BOS where the model wants one, so none is added."""
        return self.encode(self.render_chat(messages, **options), special=False)

    def _template(self, template: str | None, *, with_tools: bool) -> str:
        own = self.chat_template
        if isinstance(own, dict):
            if template is None:
                template = "tool_use" if with_tools and "tool_use" in own else "default"
                if template not in own:
                    raise InputError(f"this tokenizer has no default chat template; name one of {', '.join(own)}")
            return own.get(template, template)
        source = own if template is None else template
        if source is None:
            raise InputError("this tokenizer has no chat template; give one as template, or use encode for plain text")
        return source

    # Saving

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write files that transformers' AutoTokenizer opens, all or none."""
        write_files(Path(directory), self._files())

    def _files(self) -> dict[str, bytes]:
        return saved_files(self)

    def __repr__(self) -> str:
        return f"Tokenizer({type(self.backend.model).__name__}, {self.vocab_size} tokens)"


def _whole(text: object) -> str:
    if not isinstance(text, str):
        raise InputError(f"a text is a string, not {type(text).__name__}; for several texts use encode_batch")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the text has half a surrogate pair at character {error.start}; repair it first") from error
    return text


def _id(number: Any) -> int:
    try:
        whole = index(number)
    except TypeError as error:
        raise InputError(f"an id is a whole number, not {number!r:.40}") from error
    if not 0 <= whole < 1 << 32:
        raise InputError(f"an id is a whole number from 0 on, not {whole}")
    return whole
