"""Train a byte-level BPE tokenizer, or build a byte tokenizer."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cutaway.errors import InputError
from cutaway.tokenizer.file_io import MAX_VOCAB_SIZE, wrap_tokenizers_errors
from cutaway.tokenizer.split_patterns import GPT4_SPLIT_PATTERN, build_byte_level_pre_tokenizer, bytes_to_unicode
from cutaway.tokenizer.tokenizer import Tokenizer

DEFAULT_SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>")
MASK_TOKEN = "[MASK]"
"""Mask token for masked language modeling, as in BERT. It includes the preceding space, as most word tokens do."""
_TOKENS_BY_ROLE = {
    "bos_token": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos_token": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad_token": ("<|pad|>", "<pad>", "<|padding|>"),
    "mask_token": (MASK_TOKEN, "<mask>", "<|mask|>"),
}
"""Role → common texts of this special token. A token in `special_tokens` gets the role that lists its text."""


def byte_tokenizer(*, special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS) -> Tokenizer:
    """Build a byte tokenizer: UTF-8 bytes have ids 0 to 255; special tokens follow. `encode` adds no special tokens."""
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
    """Train byte-level BPE with the split pattern of GPT-4. Training is deterministic, and encoding is lossless.

    Special tokens have the last ids. The vocabulary is smaller than `vocab_size` if no pairs are left to merge.
    """
    if isinstance(texts, str):
        raise InputError("train_bpe takes an iterable of texts; pass a single text as a list")
    _check_special_tokens(special_tokens)
    min_size = 256 + len(special_tokens)
    if not isinstance(vocab_size, int) or not min_size <= vocab_size <= MAX_VOCAB_SIZE:
        raise InputError(
            f"vocab_size is {vocab_size!r}; it must be at least {min_size} (bytes and special tokens) and at most 2^22"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = build_byte_level_pre_tokenizer([GPT4_SPLIT_PATTERN])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_tokens = vocab_size - len(special_tokens)
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=alphabet, show_progress=False)
    checked = _check_strings(texts)
    wrap_tokenizers_errors("the training text", lambda: backend.train_from_iterator(checked, trainer), "check it")
    backend.add_special_tokens(_as_added_tokens(special_tokens))
    return Tokenizer(backend, special_tokens_map=_map_special_tokens(special_tokens))


def _check_strings(texts: Iterable[str]) -> Iterable[str]:
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"training text {i} is a {type(text).__name__}; pass strings")
        yield text


def _check_special_tokens(special_tokens: Sequence[str]) -> None:
    are_strings = all(isinstance(token, str) and token for token in special_tokens)
    if not are_strings or len(set(special_tokens)) != len(special_tokens):
        raise InputError("special_tokens must be distinct strings that are not empty")


def _as_added_tokens(tokens: Iterable[str]) -> list[str | AddedToken]:
    return [
        AddedToken(token, normalized=False, special=True, lstrip=token in _TOKENS_BY_ROLE["mask_token"])
        for token in tokens
    ]


def _map_special_tokens(special_tokens: Sequence[str]) -> dict[str, str]:
    # Reversed, so that the first of several texts of a role is used.
    roles = [(role, token) for role, names in _TOKENS_BY_ROLE.items() for token in reversed(names)]
    return {role: token for role, token in roles if token in special_tokens}
