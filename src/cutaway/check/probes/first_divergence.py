"""The first module at which two runs part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutaway.check.context import CheckContext

MAX_RECORDED_BYTES = 1 << 28
"""Bytes of values that are kept to be compared."""


@torch.no_grad()
def find_first_divergence(
    context: CheckContext,
    run_first: Callable[[], Any],
    run_second: Callable[[], Any],
    positions: slice = slice(None),
    second_positions: slice | None = None,
) -> str | None:
    """The path of the first module whose output differs at these positions; None where there is no module to look into.

    A module is done before those that hold it, so the smallest part that differs is named. `second_positions` are those
    of the second run, where they are not the same.
    """
    module = context.model.module
    if module is None:
        return None
    a, b = (
        _record_outputs(module, run_first, positions),
        _record_outputs(module, run_second, positions if second_positions is None else second_positions),
    )
    for (name, x), (again, y) in zip(a, b, strict=False):
        if name != again or x.shape != y.shape:
            return name or None
        floor = 100 * (torch.finfo(x.dtype).eps + context.noise_ratio) * float(x.abs().max() if x.numel() else 0.0)
        if x.numel() and not float((x - y).abs().max()) <= floor:
            return name or None
    return None


def _record_outputs(module: Any, run: Callable[[], Any], positions: slice) -> list[tuple[str, Tensor]]:
    """What each module gives in one run, in order, at these positions."""
    seen: list[tuple[str, Tensor]] = []
    bytes_kept = 0
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _given: Any, out: Any) -> None:
            nonlocal bytes_kept
            out = out[0] if isinstance(out, tuple) and out else out
            if (
                isinstance(out, Tensor)
                and out.is_floating_point()
                and out.ndim == 3
                and bytes_kept < MAX_RECORDED_BYTES
            ):
                kept = out[:, positions].detach().clone()
                bytes_kept += kept.nbytes
                seen.append((name, kept))

        return hook

    try:
        hooks = [part.register_forward_hook(keep(name)) for name, part in module.named_modules()]
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen
