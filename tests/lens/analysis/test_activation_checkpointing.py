"""What activation checkpointing saves of memory, measured."""

import torch

import cutaway as ct
from cutaway.lens.analysis import activation_checkpointing_cost

TOKENS = torch.arange(3, 15)[None]


def test_activation_checkpointing_keeps_less_and_leaves_the_model_as_it_was() -> None:
    model = ct.build("tiny-llama", seed=0).use_activation_checkpointing("selective")
    found = activation_checkpointing_cost(model, TOKENS, num_repeats=1)
    none, selective, full = found.values[:, 0].tolist()
    assert full < selective < none
    assert (found.values[:, 1] > 0).all()
    assert all(stack.activation_checkpointing == "selective" for stack in model.stacks.values())
    assert all(each.grad is None for each in model.parameters())
