"""Tokenizers: load, train, save, encode, decode, streaming decode and chat templates."""

from cutaway.tokenizer.decode_stream import DecodeStream
from cutaway.tokenizer.formats.gguf import tokenizer_from_gguf, tokenizer_to_gguf
from cutaway.tokenizer.load import load_tokenizer
from cutaway.tokenizer.tokenizer import Tokenizer
from cutaway.tokenizer.train import byte_tokenizer, train_bpe

__all__ = [
    "DecodeStream",
    "Tokenizer",
    "byte_tokenizer",
    "load_tokenizer",
    "tokenizer_from_gguf",
    "tokenizer_to_gguf",
    "train_bpe",
]
