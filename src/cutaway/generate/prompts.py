"""Conversion of prompts to token ids. A prompt is a text, a list of token ids or a chat."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cutaway.errors import CutawayError, InputError
from cutaway.generate.engine.config import EngineConfig
from cutaway.generate.generation_config import GenerationConfig
from cutaway.generate.sampling.sampling_params import SamplingParams, as_int
from cutaway.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""A text, token ids, or the messages of a chat."""


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or a sequence of prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items = _as_list(prompts)
    if items is None:
        raise InputError(f"prompts is a {type(prompts).__name__}; pass a text, token ids, or a list of prompts")
    if items and (as_int(items[0]) is not None or isinstance(items[0], Mapping)):
        return [items]
    return items


def _encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    content = prompt if isinstance(prompt, str) else _as_list(prompt)
    if content is None:
        raise InputError(f"the prompt is a {type(prompt).__name__}; pass a text, a list of token ids, or chat messages")
    if not isinstance(content, str) and not any(issubclass(kind, Mapping) for kind in set(map(type, content))):
        return content
    if tokenizer is None:
        raise InputError("this model has no tokenizer, so text cannot be encoded; pass lists of token ids")
    return tokenizer.encode(content) if isinstance(content, str) else tokenizer.encode_chat(content)


def _as_list(value: object) -> list[Any] | None:
    """Convert a sequence or a 1-dimensional array to a list. Return None for other types."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    dimensions = getattr(value, "ndim", 0)
    if not dimensions or not hasattr(value, "tolist"):
        return None
    if dimensions > 1:
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        raise InputError(f"prompts is a {kind} with {dimensions} dimensions; pass lists of token ids, without padding")
    return list(value.tolist())


@dataclass
class GenerationInputs:
    """Tokenized prompts, sampling parameters per prompt, and the engine configuration."""

    engine_config: EngineConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig
    prompts: list[list[int]]
    sampling_params: list[SamplingParams]
    adapters: list[str | None]
    """Adapter of each prompt; None is the base model."""


@contextmanager
def prompt_index_in_errors(index: int, num_prompts: int) -> Iterator[None]:
    """Context manager: prefix the message of a CutawayError with the prompt's index, if there are several prompts."""
    try:
        yield
    except CutawayError as error:
        if num_prompts == 1:
            raise
        raise type(error)(f"prompt {index}: {error}") from None


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Convert one prompt or several prompts to lists of token ids."""
    prompt_list = as_prompt_list(prompts)
    tokens = []
    for i, prompt in enumerate(prompt_list):
        with prompt_index_in_errors(i, len(prompt_list)):
            tokens.append(_encode_prompt(prompt, tokenizer))
    return tokens
