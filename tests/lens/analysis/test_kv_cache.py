"""One pass over a text equals many steps with a cache."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.analysis import cached_decoding_error

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-mla", "tiny-moe", "tiny-t5"])
def test_one_pass_is_many_steps(name: str) -> None:
    model = ct.build(name, seed=0, dtype=torch.float64)
    source = TOKENS.flip(-1) if len(model.stacks) > 1 else None
    found = cached_decoding_error(model, TOKENS, source=source)
    assert found.values.shape == (12,)
    assert found.values.max() < 1e-10


def test_an_encoder_has_no_steps() -> None:
    with pytest.raises(InputError, match="at once or not at all"):
        cached_decoding_error(ct.build("tiny-bert", seed=0), TOKENS)
