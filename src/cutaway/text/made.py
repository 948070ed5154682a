"""Tokenizers made here: the 256 bytes alone, or byte-level BPE trained on texts."""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cutaway.errors import InputError
from cutaway.text.files import MOST_TOKENS, in_rust
from cutaway.text.splits import GPT4, byte_characters, byte_level
from cutaway.text.tokenizer import Tokenizer

SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
MASK = "<mask>"
"""Beside them, where tokens are to be hidden. It takes the space before it, which is part of most words' tokens."""
_ROLES = {
    "bos_token": ("<|bos|>", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos_token": ("<|eos|>", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad_token": ("<|pad|>", "<pad>", "<|padding|>"),
    "mask_token": (MASK, "<|mask|>", "[MASK]"),
}
"""A special token has a role if it is named in one of the usual ways."""


def byte_tokenizer(*, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Each byte of UTF-8 is its own id, 0 to 255; then BOS, EOS and padding. Nothing is added to a text by itself."""
    _check_special(special)
    ids = {character: byte for byte, character in byte_characters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_special(special))
    return Tokenizer(backend, named=_named(special))


def train_bpe(texts: Iterable[str], vocab_size: int, *, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Byte-level BPE on GPT-4's split. Equal texts give equal tokenizers, and any text can be decoded from its ids.

    Special tokens come last. The vocabulary is smaller than asked for where the texts have no more pairs to merge.
    """
    if isinstance(texts, str):
        raise InputError("train_bpe takes several texts; put a single one into a list")
    _check_special(special)
    least = 256 + len(special)
    if not isinstance(vocab_size, int) or not least <= vocab_size <= MOST_TOKENS:
        raise InputError(f"vocab_size {vocab_size!r} must be a whole number from {least} (bytes and special tokens) on")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = byte_level([GPT4])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    in_rust("the training text", lambda: backend.train_from_iterator(_strings(texts), trainer))
    backend.add_special_tokens(_special(special))
    return Tokenizer(backend, named=_named(special))


def _strings(texts: Iterable[str]) -> Iterable[str]:
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {place} for training is a {type(text).__name__}, not a string")
        yield text


def _check_special(special: Sequence[str]) -> None:
    if len(set(special)) != len(special) or not all(isinstance(token, str) and token for token in special):
        raise InputError("special tokens are strings, none of them empty and none twice")


def _special(tokens: Iterable[str]) -> list[str | AddedToken]:
    return [AddedToken(token, normalized=False, special=True, lstrip=token == MASK) for token in tokens]


def _named(special: Sequence[str]) -> dict[str, str]:
    found = {role: next((token for token in names if token in special), None) for role, names in _ROLES.items()}
    return {role: token for role, token in found.items() if token is not None}
