"""Decoding with a KV cache equals one forward pass."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.analysis import cached_decoding_error

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-mla", "tiny-moe", "tiny-t5"])
def test_cached_decoding_equals_one_forward_pass(name: str) -> None:
    model = ct.build(name, seed=0, dtype=torch.float64)
    source = TOKENS.flip(-1) if len(model.stacks) > 1 else None
    errors = cached_decoding_error(model, TOKENS, source=source)
    assert errors.values.shape == (12,)
    assert errors.values.max() < 1e-10


def test_encoder_is_an_error() -> None:
    with pytest.raises(InputError, match="cannot decode token by token"):
        cached_decoding_error(ct.build("tiny-bert", seed=0), TOKENS)
