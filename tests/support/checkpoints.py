"""Small checkpoints with a byte tokenizer and random weights, and texts to evaluate them on."""

from pathlib import Path
from typing import Any

import torch

import cutaway as ct
from cutaway.families.checkpoint import Checkpoint
from cutaway.tokenizer import Tokenizer, byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and naïve models tell it byte by byte. " * 2
TEXTS = ["The quick brown fox jumps over the lazy dog and runs away from it.", "she sells sea shells", "model"]


def small_checkpoint(
    preset: str = "tiny-llama", tokenizer: Tokenizer | None = None, **config_changes: Any
) -> Checkpoint:
    """Return a byte-level checkpoint whose weights are scaled by 3, so that its predictions differ between tokens."""
    config = ct.config(ct.config(preset).model_dump() | {"vocab_size": 260} | config_changes)
    model = ct.build(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    loaded = tokenizer or byte_tokenizer()
    generation_config = {"decoder_start_token_id": 0, "eos_token_id": 257} if "encoder" in model.stacks else {}
    return Checkpoint(model, config, generation_config=generation_config, tokenizer_loader=lambda: loaded)


def save_small_checkpoint(
    directory: Path, preset: str = "tiny-llama", chat_template: str | None = None, **config_changes: Any
) -> Path:
    """Save a small checkpoint with vocab_size 259; `chat_template` makes it a chat model."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    return ct.save(small_checkpoint(preset, tokenizer, **({"vocab_size": 259} | config_changes)), directory)
