"""Claims that are measured: one pass equals many steps, and what recomputation saves."""

import pytest
import torch

import cutaway as ct
from cutaway.errors import InputError
from cutaway.learn import claim
from cutaway.learn.claim import ClaimError
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


def test_a_claim_holds_or_says_what_was_measured() -> None:
    assert str(claim("scores spread by √64", 7.97, predicted=8, within=0.05)).endswith("8 ± 5 %   measured 7.97")
    assert str(claim("tokens that differ", 0, predicted=0)).endswith("predicted 0   measured 0")
    with pytest.raises(ClaimError, match="predicted above 2, measured 1"):
        claim("a batch writes faster", 1, above=2)
    with pytest.raises(ClaimError, match="measured nan"):
        claim("a loss is a number", float("nan"), predicted=0)
    with pytest.raises(ValueError, match="predicts nothing"):
        claim("anything", 1)
