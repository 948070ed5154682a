"""`find_first_divergence`: the first module whose output differs between two runs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.context import CheckContext

_MAX_RECORDED_BYTES = 1 << 28
"""Maximum total size of the recorded outputs, in bytes."""


def find_first_divergence(
    ctx: CheckContext,
    run_first: Callable[[], object],
    run_second: Callable[[], object],
    positions: slice = slice(None),
    second_positions: slice | None = None,
) -> str | None:
    """Path of the first module whose output differs at `positions`; None if there is no module or no difference.

    A submodule finishes before the module that contains it, so the innermost module with a difference is returned.
    `second_positions` are the corresponding positions in the second run; the default is `positions`.
    """
    module = ctx.model.module
    if module is None:
        return None
    first = _record_outputs(module, run_first, positions)
    second = _record_outputs(module, run_second, second_positions or positions)
    for (name, x), (second_name, y) in zip(first, second, strict=False):
        if name != second_name or x.shape != y.shape:
            return name or None
        tolerance = 100 * (torch.finfo(x.dtype).eps + ctx.noise_ratio) * float(x.abs().max() if x.numel() else 0.0)
        if x.numel() and not float((x - y).abs().max()) <= tolerance:
            return name or None
    return None


def _record_outputs(module: nn.Module, run: Callable[[], object], positions: slice) -> list[tuple[str, Tensor]]:
    """Record (module path, output at `positions`) of each module with a (B, T, d) output, in the order they finish."""
    outputs: list[tuple[str, Tensor]] = []

    def record(name: str, _module: nn.Module, _inputs: object, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) and out else out
        is_hidden_state = isinstance(out, Tensor) and out.is_floating_point() and out.ndim == 3
        if is_hidden_state and sum(x.nbytes for _, x in outputs) < _MAX_RECORDED_BYTES:
            outputs.append((name, out[:, positions].detach().clone()))

    with ExitStack() as hooks:
        for name, submodule in module.named_modules():
            hooks.enter_context(submodule.register_forward_hook(partial(record, name)))
        run()
    return outputs
