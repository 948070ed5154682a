"""Tokenizers and chat templates: text to ids and back, exactly as a model's files say."""

from cutaway.text.directory import tokenizer_from_directory
from cutaway.text.gguf import tokenizer_from_gguf
from cutaway.text.made import byte_tokenizer, train_bpe
from cutaway.text.stream import Stream
from cutaway.text.to_gguf import tokenizer_to_gguf
from cutaway.text.tokenizer import Tokenizer

__all__ = [
    "Stream",
    "Tokenizer",
    "byte_tokenizer",
    "tokenizer_from_directory",
    "tokenizer_from_gguf",
    "tokenizer_to_gguf",
    "train_bpe",
]
