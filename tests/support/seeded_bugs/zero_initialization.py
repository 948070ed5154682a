"""Seeded bugs in models whose parameters are zero at initialization."""

from typing import Any

import torch
from support.healthy_models.gpt import GPT, MLP, Block, FusedAttention
from support.healthy_models.registry import initialize
from support.seeded_bugs.registry import seeded_bug
from torch import Tensor, nn


class UnusedPositions(GPT):
    """Never adds its position table."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


@seeded_bug("position-encoding", also_caught_by=("unused-parameters",))
def position_table_of_zeros_never_added() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = initialize(UnusedPositions([Block(FusedAttention(), MLP()) for _ in range(2)]))
    nn.init.zeros_(model.wpe.weight)
    return model, {}
