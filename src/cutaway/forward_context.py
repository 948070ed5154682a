"""Context (`contextvars`) of a forward pass, for blocks that the backward pass recomputes."""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_IN_FORWARD_CONTEXT: ContextVar[bool] = ContextVar("cutaway_in_forward_context", default=False)


def keep_context(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function` in a copy of the current context.

    The backward pass recomputes blocks (activation checkpointing), on CUDA in another thread. Edits (`ct.edit`) belong
    to the context of the forward pass and have to apply there too.
    """
    copied = copy_context()
    copied.run(_IN_FORWARD_CONTEXT.set, True)
    return partial(copied.run, function)


def in_forward_context() -> bool:
    """Whether the current call runs in a context that `keep_context` has copied, maybe in another thread."""
    return _IN_FORWARD_CONTEXT.get()
