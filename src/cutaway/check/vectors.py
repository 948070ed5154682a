"""The vectors that tokens become: where gradients with respect to a text are taken."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.exam import CannotError


def tables(module: nn.Module, run: Any, tokens: Tensor) -> list[nn.Module]:
    """The modules that are given just these tokens and give a vector for each."""
    found: list[nn.Module] = []
    hooks = []

    def look(part: nn.Module, given: Any, out: Any) -> None:
        same = is_given(given, tokens)
        if same and isinstance(out, Tensor) and out.ndim == 3 and out.is_floating_point() and part not in found:
            found.append(part)

    try:
        hooks = [part.register_forward_hook(look) for part in module.modules() if not list(part.children())]
        with torch.no_grad():
            run(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def is_given(given: Any, tokens: Tensor) -> bool:
    """Whether these arguments are just these tokens."""
    first = given[0] if given else None
    return isinstance(first, Tensor) and first.shape == tokens.shape and bool((first == tokens).all())


@contextmanager
def moved(module: nn.Module | None, run: Any, tokens: Tensor) -> Iterator[list[Tensor]]:
    """While it lasts, `run(tokens)` adds zeros to the tokens' vectors; the list then holds them, for gradients."""
    found = [] if module is None else tables(module, run, tokens)
    if not found:
        raise CannotError("needs the module, with an embedding that is given the tokens")
    added: list[Tensor] = []

    def add(_part: nn.Module, given: Any, out: Tensor) -> Tensor:
        if not is_given(given, tokens):  # of an encoder-decoder, the source may be read by the same table
            return out
        if not added:
            added.append(torch.zeros_like(out, requires_grad=True))
        return out + added[0]

    hook = found[0].register_forward_hook(add)
    try:
        yield added
    finally:
        hook.remove()
