"""Tokenizers made here: the 256 bytes alone, or byte-level BPE trained on texts."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE, wrap_tokenizers_errors
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN, build_byte_level_pre_tokenizer, bytes_to_unicode
from cutaway.tokenizer.tokenizer import Tokenizer

DEFAULT_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
MASK_TOKEN = "<mask>"
"""Beside them, where tokens are to be hidden. It takes the space before it, which is part of most words' tokens."""
_TOKENS_BY_ROLE = {
    "bos_token": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos_token": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad_token": ("<|pad|>", "<pad>", "<|padding|>"),
    "mask_token": (MASK_TOKEN, "<|mask|>", "[MASK]"),
}
"""A special token has a role if it is named in one of the usual ways."""


def byte_tokenizer(*, special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS) -> Tokenizer:
    """Each byte of UTF-8 is its own id, 0 to 255; then BOS, EOS and padding. Nothing is added to a text by itself."""
    _check_special_tokens(special_tokens)
    ids = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_as_added_tokens(special_tokens))
    return Tokenizer(backend, special_tokens_map=_map_special_tokens(special_tokens))


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS
) -> Tokenizer:
    """Byte-level BPE on GPT-4's split. Equal texts give equal tokenizers, and any text can be decoded from its ids.

    Special tokens come last. The vocabulary is smaller than asked for where the texts have no more pairs to merge.
    """
    if isinstance(texts, str):
        raise InputError("train_bpe takes several texts; put a single one into a list")
    _check_special_tokens(special_tokens)
    least = 256 + len(special_tokens)
    if not isinstance(vocab_size, int) or not least <= vocab_size <= MAX_VOCAB_SIZE:
        raise InputError(f"vocab_size {vocab_size!r} must be a whole number from {least} (bytes and special tokens) on")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = build_byte_level_pre_tokenizer([GPT4_SPLIT_PATTERN])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    wrap_tokenizers_errors("the training text", lambda: backend.train_from_iterator(_check_strings(texts), trainer))
    backend.add_special_tokens(_as_added_tokens(special_tokens))
    return Tokenizer(backend, special_tokens_map=_map_special_tokens(special_tokens))


def _check_strings(texts: Iterable[str]) -> Iterable[str]:
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {place} for training is a {type(text).__name__}, not a string")
        yield text


def _check_special_tokens(special_tokens: Sequence[str]) -> None:
    if len(set(special_tokens)) != len(special_tokens) or not all(
        isinstance(token, str) and token for token in special_tokens
    ):
        raise InputError("special tokens are strings, none of them empty and none twice")


def _as_added_tokens(tokens: Iterable[str]) -> list[str | AddedToken]:
    return [AddedToken(token, normalized=False, special=True, lstrip=token == MASK_TOKEN) for token in tokens]


def _map_special_tokens(special_tokens: Sequence[str]) -> dict[str, str]:
    found = {
        role: next((token for token in names if token in special_tokens), None)
        for role, names in _TOKENS_BY_ROLE.items()
    }
    return {role: token for role, token in found.items() if token is not None}
