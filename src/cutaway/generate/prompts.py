"""What `generate` is given, as tokens: texts, ids or chats, one or many."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cutaway.errors import CutawayError, InputError
from cutaway.generate.sampling.sampling_params import as_int
from cutaway.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, its tokens, or the messages of a chat."""


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    given = _as_list(prompts)
    if given is None:
        raise InputError(f"prompts are a {type(prompts).__name__}; give a text, a list of ids, or a list of those")
    if given and (as_int(given[0]) is not None or isinstance(given[0], Mapping)):
        return [given]
    return given


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's tokens."""
    given: Any = prompt if isinstance(prompt, str) else _as_list(prompt)
    if given is None:
        raise InputError(f"a prompt is a {type(prompt).__name__}; give a text, a list of ids, or a chat's messages")
    if not isinstance(given, str) and not any(isinstance(part, Mapping) for part in given):
        return given
    if tokenizer is None:
        raise InputError("this model has no tokenizer to read text with; give lists of token ids")
    return tokenizer.encode(given) if isinstance(given, str) else tokenizer.encode_chat(given)


def _as_list(value: Any) -> list[Any] | None:
    """What a list or a row of ids holds; None if it is something else."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    dimensions = getattr(value, "ndim", 0)
    if not dimensions or not hasattr(value, "tolist"):
        return None
    if dimensions > 1:
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        raise InputError(f"prompts are a {kind} of {dimensions} dimensions; pass lists of ids, without padding")
    ids: list[Any] = value.tolist()
    return ids


def add_prompt_index(error: CutawayError, index: int, num_prompts: int) -> CutawayError:
    """An error that says which of several prompts it is about."""
    return error if num_prompts == 1 else type(error)(f"prompt {index}: {error}")


def encode_prompts(prompts: Prompt | Sequence[Prompt], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The tokens of each prompt."""
    given = as_prompt_list(prompts)
    tokens = []
    for number, prompt in enumerate(given):
        try:
            tokens.append(encode_prompt(prompt, tokenizer))
        except CutawayError as error:
            raise add_prompt_index(error, number, len(given)) from None
    return tokens
