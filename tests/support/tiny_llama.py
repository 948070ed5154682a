"""Random Llamas saved by transformers, as the base models of fine-tuning tests."""

from pathlib import Path
from typing import Any

import torch
import transformers
from support.chat_templates import STYLES

from cutaway.tokenizer import Tokenizer, byte_tokenizer

CHAT_VOCAB_SIZE = 264
"""At least the number of tokens of `chat_tokenizer`."""


def save_tiny_llama(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> Path:
    """Save a random Llama of two layers with a tokenizer, by default that of bytes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | config)).save_pretrained(directory)
    (tokenizer or byte_tokenizer()).save(directory)
    return directory


def chat_tokenizer(style: str = "chatml") -> Tokenizer:
    """Byte tokenizer with the special tokens and the template of a chat style."""
    backend = byte_tokenizer().backend
    backend.add_special_tokens(STYLES[style].special_tokens.split())
    tokenizer = Tokenizer(backend, special_tokens_map={"eos_token": "<|im_end|>"}, chat_template=STYLES[style].template)
    assert tokenizer.vocab_size <= CHAT_VOCAB_SIZE
    return tokenizer


def save_chat_llama(directory: Path) -> Path:
    """Save a random Llama with a chat template."""
    options = {"max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1}
    return save_tiny_llama(directory, chat_tokenizer(), vocab_size=CHAT_VOCAB_SIZE, **options)
