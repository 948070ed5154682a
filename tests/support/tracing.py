"""Helpers for tests of traces and edits: fixed tokens, a forward pass on random tokens, the number of hooks."""

import torch
from support.config_strategies import SEQ_LEN, compute_logits, random_tokens
from torch import nn

from cutaway import config as c
from cutaway.model import Transformer

BATCH_SIZE = 3
TOKENS = torch.arange(18).view(2, 9)


def count_hooks(model: nn.Module) -> int:
    attributes = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in attributes)


def run_random_tokens(
    model: Transformer, config: c.Config, seed: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    return compute_logits(model, config, random_tokens(config, BATCH_SIZE, SEQ_LEN, seed), mask)
