"""Mixed precision: loss scaling for fp16, and CPUs without bf16.

fp16's gradients are taken larger than they are, so that small ones do not vanish; how much larger is found out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.model.device import has_native_bf16

INIT_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""It doubles after so many good steps on end, and halves at each bad one: the numbers of PyTorch's GradScaler."""


class GradScaler:
    """What a loss is multiplied by before its gradient is taken; it lives on the device, and nobody waits for it."""

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), INIT_SCALE, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        """Good steps since it last changed."""

    def update(self, found_inf: Tensor) -> None:
        """After a step, whose gradient was not finite if `found_inf`."""
        torch._amp_update_scale_(
            self.scale, self.growth_tracker, found_inf.float(), GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.scale.copy_(state_dict["scale"])
        self.growth_tracker.copy_(state_dict["growth_tracker"])


def disable_onednn_without_bf16(device: torch.device) -> None:
    """Before a run's first product: at the first one in bf16 that such a CPU cannot do, torch turns oneDNN off for the
    whole process, and rounds fp32 otherwise from there on. So it is off from the start, in a run that goes on as well.
    """
    if device.type == "cpu" and not has_native_bf16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
