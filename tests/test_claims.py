"""Claims that are measured: one pass equals many steps, and what recomputation saves."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.readings import recomputation, step_by_step

TOKENS = torch.arange(3, 15)[None]


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-mla", "tiny-moe", "tiny-t5"])
def test_one_pass_is_many_steps(name: str) -> None:
    model = ct.build(name, seed=0, dtype=torch.float64)
    source = TOKENS.flip(-1) if len(model.stacks) > 1 else None
    found = step_by_step(model, TOKENS, source=source)
    assert found.values.shape == (12,)
    assert found.values.max() < 1e-10


def test_an_encoder_has_no_steps() -> None:
    with pytest.raises(InputError, match="at once or not at all"):
        step_by_step(ct.build("tiny-bert", seed=0), TOKENS)


def test_recomputation_keeps_less_and_leaves_the_model_as_it_was() -> None:
    model = ct.build("tiny-llama", seed=0).use_recompute("selective")
    found = recomputation(model, TOKENS, repeats=1)
    none, selective, full = found.values[:, 0].tolist()
    assert full < selective < none
    assert (found.values[:, 1] > 0).all()
    assert all(stack.recompute == "selective" for stack in model.stacks.values())
    assert all(each.grad is None for each in model.parameters())
