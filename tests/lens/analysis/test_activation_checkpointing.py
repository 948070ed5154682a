"""Memory and time of activation checkpointing modes."""

import torch

import cutaway as ct
from cutaway.lens.analysis import activation_checkpointing_cost

TOKENS = torch.arange(3, 15)[None]


def test_activation_checkpointing_saves_memory_and_mode_is_restored() -> None:
    model = ct.build("tiny-llama", seed=0).use_activation_checkpointing("selective")
    cost = activation_checkpointing_cost(model, TOKENS, num_repeats=1)
    none, selective, full = cost.values[:, 0].tolist()
    assert full < selective < none
    assert (cost.values[:, 1] > 0).all()
    assert all(set(stack.activation_checkpointing) == {"selective"} for stack in model.stacks.values())
    assert all(parameter.grad is None for parameter in model.parameters())
