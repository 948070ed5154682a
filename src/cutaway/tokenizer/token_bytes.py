"""Bytes of each token, for grammars: constrained decoding checks the bytes of a completion, not its decoded text."""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from cutaway.errors import InputError
from cutaway.tokenizer.decode_stream import is_byte_token
from cutaway.tokenizer.formats.marian import MarianTokenizer
from cutaway.tokenizer.split_patterns import bytes_to_unicode
from cutaway.tokenizer.tokenizer import Tokenizer

_METASPACE = "▁"
_cache: "WeakKeyDictionary[Tokenizer, dict[int, bytes]]" = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return {token id: bytes that the token adds to a text}, for all tokens that are not special tokens.

    The bytes of several tokens, joined, are the text that `decode` returns, except that `decode` may remove a space at
    the beginning and those of `clean_up_tokenization_spaces`. Raise if a token's bytes depend on its neighbors, as in
    WordPiece."""
    if tokenizer in _cache:
        return _cache[tokenizer]
    to_bytes = _token_to_bytes(tokenizer)
    tokens = ((token_id, tokenizer.id_to_token(token_id)) for token_id in range(_max_token_id(tokenizer) + 1))
    skipped = tokenizer.decode_skip_ids | tokenizer.all_special_ids
    result = {token_id: to_bytes(token) for token_id, token in tokens if token is not None and token_id not in skipped}
    _cache[tokenizer] = result
    return result


def _max_token_id(tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, MarianTokenizer):
        return tokenizer.vocab_size - 1
    return max(tokenizer.backend.get_vocab(with_added_tokens=True).values())


def _token_to_bytes(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """Function that maps a token, as written in the vocabulary, to bytes."""
    if isinstance(tokenizer, MarianTokenizer):
        return lambda token: token.replace(_METASPACE, " ").encode()
    decoder = tokenizer.backend.decoder
    steps = [] if decoder is None else _flatten_decoder(json.loads(decoder.__getstate__()))
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level_token_to_bytes
    if not steps:
        raise InputError(_unsupported("it has no decoder, so that spaces are inserted between tokens"))
    replacements: list[tuple[re.Pattern[str] | str, str]] = []
    for step in steps:
        match step["type"]:
            case "Metaspace":
                replacements.append((step["replacement"], " "))
            case "BPEDecoder":
                replacements.append((step["suffix"], " "))
            case "Replace":
                pattern = step["pattern"]
                is_regex = "Regex" in pattern
                replacements.append((re.compile(pattern["Regex"]) if is_regex else pattern["String"], step["content"]))
            case "ByteFallback" | "Fuse" | "Strip":  # Strip removes the space that the encoder adds to a text
                continue
            case other:
                raise InputError(_unsupported(f"its decoder ({other}) changes tokens depending on their neighbors"))

    def to_bytes(token: str) -> bytes:
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        for old, new in replacements:
            token = token.replace(old, new) if isinstance(old, str) else old.sub(new, token)
        return token.encode()

    return to_bytes


def _flatten_decoder(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _flatten_decoder(each)]
    return [decoder]


_BYTE_OF_CHAR = {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level_token_to_bytes(token: str) -> bytes:
    """Bytes of a token of byte-level BPE. A character outside the byte alphabet, in an added token, is text."""
    if all(character in _BYTE_OF_CHAR for character in token):
        return bytes(_BYTE_OF_CHAR[character] for character in token)
    return token.encode()


def _unsupported(reason: str) -> str:
    return (
        f"this tokenizer does not support structured output: {reason}; leave out the schema, regex, choice or grammar"
    )


class BytesDecodeStream:
    """Incremental decoder that joins the bytes of the tokens: no space is removed at the beginning of the text."""

    def __init__(self, bytes_of_token: dict[int, bytes]) -> None:
        self._bytes_of_token = bytes_of_token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Add a token id. Return the new text, or '' while a character is incomplete or for a special token."""
        return self._decoder.decode(self._bytes_of_token.get(token_id, b""))

    def finish(self) -> str:
        """Return the remaining text: a replacement character for an incomplete character."""
        return self._decoder.decode(b"", final=True)
