"""A model in fp64 whose logits are a table: the logits at a position depend only on the token at this position."""

from typing import Any

import torch
from torch import Tensor, nn


class BigramModel(nn.Module):
    """Random logits, of which gradients can be computed. It has the attributes of a model that objectives use."""

    def __init__(self, vocab_size: int = 11, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, dtype=torch.float64, generator=generator))
        self.head = nn.Identity()
        self.device, self.stacks = torch.device("cpu"), dict[str, Any]()

    def hidden_states(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def use_activation_checkpointing(self, kind: str) -> "BigramModel":
        return self
