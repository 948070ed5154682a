"""The first module at which two runs part."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cutaway.check.exam import Exam

MOST = 1 << 28
"""Bytes of values that are kept to be compared."""


@torch.no_grad()
def first_difference(
    exam: "Exam",
    one: Callable[[], Any],
    other: Callable[[], Any],
    positions: slice = slice(None),
    others: slice | None = None,
) -> str | None:
    """The path of the first module whose output differs at these positions; None where there is no module to look into.

    A module is done before those that hold it, so the smallest part that differs is named. `others` are the positions
    of the other run, where they are not the same.
    """
    module = exam.target.module
    if module is None:
        return None
    a, b = outputs(module, one, positions), outputs(module, other, positions if others is None else others)
    for (name, x), (again, y) in zip(a, b, strict=False):
        if name != again or x.shape != y.shape:
            return name or None
        floor = 100 * (torch.finfo(x.dtype).eps + exam.ratio) * float(x.abs().max() if x.numel() else 0.0)
        if x.numel() and not float((x - y).abs().max()) <= floor:
            return name or None
    return None


def outputs(module: Any, run: Callable[[], Any], positions: slice) -> list[tuple[str, Tensor]]:
    """What each module gives in one run, in order, at these positions."""
    seen: list[tuple[str, Tensor]] = []
    bytes_kept = 0
    hooks = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: Any, _given: Any, out: Any) -> None:
            nonlocal bytes_kept
            out = out[0] if isinstance(out, tuple) and out else out
            if isinstance(out, Tensor) and out.is_floating_point() and out.ndim == 3 and bytes_kept < MOST:
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
