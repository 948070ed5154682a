"""Mixed precision: dynamic loss scaling for fp16, and a setting for CPUs without native bf16.

Loss scaling multiplies the loss by a factor, so that small fp16 gradients do not underflow. The factor is adapted
during training.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cutaway.device import has_native_bf16
from cutaway.train.recipe.schema import Precision

INIT_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""The scale doubles after GROWTH_INTERVAL finite steps and halves after a non-finite step, as in torch.amp."""


def compute_dtype(precision: Precision) -> torch.dtype:
    """Dtype to which matrix products are autocast. With float8, it is that of the products that are not in fp8."""
    return {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)


class GradScaler:
    """Dynamic loss scale, stored as a tensor on the device so that updating it does not synchronize."""

    def __init__(self, device: torch.device | str) -> None:
        self.scale = torch.full((), INIT_SCALE, device=device)
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        """Number of consecutive finite steps since the scale last changed."""

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step. `found_inf` is true if the gradient of the step was not finite."""
        torch._amp_update_scale_(
            self.scale, self.growth_tracker, found_inf.float(), GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.scale.copy_(state_dict["scale"])
        self.growth_tracker.copy_(state_dict["growth_tracker"])


def disable_onednn_without_bf16(device: torch.device) -> None:
    """Disable oneDNN before a run's first matrix product, on a CPU without native bf16.

    At the first bf16 product that such a CPU cannot compute, PyTorch disables oneDNN for the whole process, and fp32
    results are rounded differently from then on. With oneDNN disabled from the start, a resumed run rounds in the same
    way as an uninterrupted run.
    """
    if device.type == "cpu" and not has_native_bf16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
