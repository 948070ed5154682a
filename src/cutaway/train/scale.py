"""fp16's gradients are taken larger than they are, so that small ones do not vanish; how much larger is found out."""

from collections.abc import Mapping

import torch
from torch import Tensor

FIRST = 2.0**16
GROWS, SHRINKS, EVERY = 2.0, 0.5, 2000
"""It doubles after so many good steps on end, and halves at each bad one: the numbers of PyTorch's GradScaler."""


class Scale:
    """What a loss is multiplied by before its gradient is taken; it lives on the device, and nobody waits for it."""

    def __init__(self, device: torch.device | str) -> None:
        self.value = torch.full((), FIRST, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        """Good steps since it last changed."""

    def step(self, bad: Tensor) -> None:
        """After a step, whose gradient was not finite if it is `bad`."""
        torch._amp_update_scale_(self.value, self.good, bad.float(), GROWS, SHRINKS, EVERY)

    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value, "good": self.good}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.value.copy_(tensors["value"])
        self.good.copy_(tensors["good"])
