"""`find_first_divergence`: the first module whose output differs between two runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutaway.check.context import CheckContext

MAX_RECORDED_BYTES = 1 << 28
"""Maximum bytes of recorded outputs."""


@torch.no_grad()
def find_first_divergence(
    context: CheckContext,
    run_first: Callable[[], Any],
    run_second: Callable[[], Any],
    positions: slice = slice(None),
    second_positions: slice | None = None,
) -> str | None:
    """Path of the first module whose output differs at `positions`; None if there is no module or no difference.

    A submodule finishes before the module that contains it, so the innermost one is named. `second_positions` are the
    positions in the second run, default the same.
    """
    module = context.model.module
    if module is None:
        return None
    first, second = (
        _record_outputs(module, run_first, positions),
        _record_outputs(module, run_second, positions if second_positions is None else second_positions),
    )
    for (name, x), (second_name, y) in zip(first, second, strict=False):
        if name != second_name or x.shape != y.shape:
            return name or None
        tolerance = 100 * (torch.finfo(x.dtype).eps + context.noise_ratio) * float(x.abs().max() if x.numel() else 0.0)
        if x.numel() and not float((x - y).abs().max()) <= tolerance:
            return name or None
    return None


def _record_outputs(module: Any, run: Callable[[], Any], positions: slice) -> list[tuple[str, Tensor]]:
    """Record the (B, T, d) outputs of all modules at `positions` in one run, in order."""
    outputs: list[tuple[str, Tensor]] = []
    recorded_bytes = 0
    hooks = []

    def make_hook(name: str) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, out: Any) -> None:
            nonlocal recorded_bytes
            out = out[0] if isinstance(out, tuple) and out else out
            if (
                isinstance(out, Tensor)
                and out.is_floating_point()
                and out.ndim == 3
                and recorded_bytes < MAX_RECORDED_BYTES
            ):
                recorded = out[:, positions].detach().clone()
                recorded_bytes += recorded.nbytes
                outputs.append((name, recorded))

        return hook

    try:
        hooks = [submodule.register_forward_hook(make_hook(name)) for name, submodule in module.named_modules()]
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
