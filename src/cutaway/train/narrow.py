"""Products in 16 bits on CPUs that have no units for them."""

import torch

from cutaway.generate.fast.cpu import has_bf16


def settle(device: torch.device) -> None:
    """Before a run's first product: at the first one in bf16 that such a CPU cannot do, torch turns oneDNN off for the
    whole process, and rounds fp32 otherwise from there on. So it is off from the start, in a run that goes on as well.
    """
    if device.type == "cpu" and not has_bf16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
