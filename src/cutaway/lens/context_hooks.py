"""Forward hooks that run only in the context that registered them (`contextvars`: a thread or an asyncio task).

PyTorch runs the hooks of a module in every thread. Here each module gets one dispatching hook, which runs the functions
that are active in the current context. A thread that is started inside a with-block of `trace` or `edit` does not
inherit them, unless it runs in a copied context (`asyncio.to_thread`, `contextvars.copy_context().run`).

Activation checkpointing recomputes blocks in the backward pass, on CUDA in a thread of the autograd engine, which has
no context. cutaway's checkpointing recomputes in the context of the forward pass. For other libraries' checkpointing,
the hooks on the module are used if one thread registered all of them, and it is an error if several did.

A forward pass may run while another thread registers or removes hooks: `nn.Module.__call__` iterates over a copy of the
hooks. Only if the forward pass raises an exception does it iterate over the hooks themselves, so that this exception
may then be replaced by a RuntimeError about the iteration.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import MethodType
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from cutaway.errors import InputError
from cutaway.forward_context import in_forward_context

ModuleArgs: TypeAlias = tuple[Any, ...]
"""Positional arguments of a module, with the type that PyTorch declares for them."""
ModuleKwargs: TypeAlias = dict[str, Any]
PreHook = Callable[[nn.Module, ModuleArgs, ModuleKwargs], tuple[ModuleArgs, ModuleKwargs] | None]
"""Receives the arguments of a module call. If it returns (args, kwargs), they replace the arguments."""
OutputHook = Callable[[nn.Module, ModuleArgs, Any], Any]
"""Receives the arguments and the output of a module call. If it does not return None, that replaces the output."""
ForwardWrapper = Callable[..., Any]
"""Called as `wrapper(forward, *args, **kwargs)` instead of `forward(*args, **kwargs)`."""

FIRST, LAST = -1, 100
"""Orders of hooks that run before and after all others of the same call."""

_Kind = Literal["pre", "output", "forward", "attribute"]


class _Hook(NamedTuple):
    order: int
    function: Any
    """PreHook, OutputHook or ForwardWrapper; for an attribute, (name, value)."""


class ContextHooks:
    """Hooks that are activated and deactivated together, and that run in the context of `activate` only."""

    def __init__(self) -> None:
        self.is_active = False
        self.hooks: dict[tuple[nn.Module, _Kind], list[_Hook]] = {}
        self.thread = threading.get_ident()

    def add_pre_hook(self, module: nn.Module, hook: PreHook, order: int = 0) -> None:
        self._add(module, "pre", _Hook(order, hook))

    def add_output_hook(self, module: nn.Module, hook: OutputHook, order: int = 0) -> None:
        self._add(module, "output", _Hook(order, hook))

    def add_forward_wrapper(self, module: nn.Module, wrapper: ForwardWrapper) -> None:
        """Wrap the forward method of a module. The wrapper that is added last is called first."""
        self._add(module, "forward", _Hook(0, wrapper))

    def set_attribute(self, module: nn.Module, name: str, value: object) -> None:
        """Set the value that `get_attribute` returns in this context."""
        self._add(module, "attribute", _Hook(0, (name, value)))

    def _add(self, module: nn.Module, kind: _Kind, hook: _Hook) -> None:
        self.hooks.setdefault((module, kind), []).append(hook)

    def activate(self) -> None:
        assert not self.is_active
        for module, kind in self.hooks:
            _install(module, kind)
        self.is_active = True
        _ALL_ACTIVE.append(self)
        _ACTIVE.set((*_ACTIVE.get(), self))

    def deactivate(self) -> None:
        """Remove the hooks in all contexts. Contexts that were copied inside the with-block keep a reference."""
        if not self.is_active:
            return
        self.is_active = False
        _ALL_ACTIVE.remove(self)
        _ACTIVE.set(tuple(hooks for hooks in _ACTIVE.get() if hooks.is_active))
        for module, kind in self.hooks:
            _uninstall(module, kind)
        self.hooks = {}  # the functions hold references to traces and their recorded tensors


_ACTIVE: ContextVar[tuple[ContextHooks, ...]] = ContextVar("cutaway_active_hooks", default=())
_ALL_ACTIVE: list[ContextHooks] = []
"""Active hooks of all contexts."""
_LOCK = threading.Lock()
"""Held while dispatching hooks are registered or removed: PyTorch counts the ids of hooks without a lock."""


def has_active_hooks() -> bool:
    """Whether any context has active hooks."""
    return bool(_ALL_ACTIVE)


def in_hook_context() -> bool:
    """Whether the current context has active hooks."""
    return bool(_ACTIVE.get())


def get_attribute(module: nn.Module, name: str, default: Any) -> Any:
    """Return the value that the last active edit of this context sets, or the default."""
    values = [value for key, value in _functions(module, "attribute") if key == name]
    return values[-1] if values else default


def is_in_backward() -> bool:
    """Whether a backward pass is running. A forward call is then a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _functions(module: nn.Module, kind: _Kind) -> list[Any]:
    """Return the functions of this context for a module, in the order in which they run."""
    active = _ACTIVE.get()
    if not active and is_in_backward() and not in_forward_context():
        active = _hooks_for_autograd_thread(module)
    hooks = [hook for group in active for hook in group.hooks.get((module, kind), ())]
    return [hook.function for hook in sorted(hooks, key=lambda hook: hook.order)]


def _hooks_for_autograd_thread(module: nn.Module) -> tuple[ContextHooks, ...]:
    """Return the hooks for a recomputation in a thread of the autograd engine, which has no context of its own."""
    if not isinstance(threading.current_thread(), threading._DummyThread):  # a Python thread: its context is known
        return ()
    groups = tuple(group for group in list(_ALL_ACTIVE) if any(key[0] is module for key in list(group.hooks)))
    if len({group.thread for group in groups}) > 1:
        problem = "several threads have an active trace or edit of this model, and its checkpointing recomputes blocks"
        raise InputError(f"{problem} in a thread of autograd; run one thread at a time, or load the model with ct.load")
    return groups


class _Installed:
    """The dispatching hook of a module, and the number of active `ContextHooks` that use it."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove, self.count = remove, 0


_INSTALLED: WeakKeyDictionary[nn.Module, dict[_Kind, _Installed]] = WeakKeyDictionary()


def _install(module: nn.Module, kind: _Kind) -> None:
    with _LOCK:
        installed = _INSTALLED.setdefault(module, {})
        if kind not in installed:
            installed[kind] = _Installed(_DISPATCHERS[kind](module))
        installed[kind].count += 1


def _uninstall(module: nn.Module, kind: _Kind) -> None:
    with _LOCK:
        installed = _INSTALLED[module]
        installed[kind].count -= 1
        if not installed[kind].count:
            installed.pop(kind).remove()
        if not installed:
            del _INSTALLED[module]


def _dispatch_pre_hooks(
    module: nn.Module, args: ModuleArgs, kwargs: ModuleKwargs | None = None
) -> tuple[ModuleArgs, ModuleKwargs] | None:
    # PyTorch looks up whether a hook takes kwargs separately from the hook. In a thread that is inside a forward pass
    # while another registers or removes this hook, it may therefore be called without them; it then has no functions.
    changed, kwargs = False, {} if kwargs is None else kwargs
    for hook in _functions(module, "pre"):
        result = hook(module, args, kwargs)
        if result is not None:
            (args, kwargs), changed = result, True
    return (args, kwargs) if changed else None


def _dispatch_output_hooks(module: nn.Module, args: ModuleArgs, output: Any) -> Any:
    changed = False
    for hook in _functions(module, "output"):
        result = hook(module, args, output)
        if result is not None:
            output, changed = result, True
    return output if changed else None


_ORIGINAL_FORWARDS: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()
"""Module → the `forward` attribute that the instance had before, if other code replaced it there."""


def _dispatch_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = _ORIGINAL_FORWARDS.get(module) or MethodType(type(module).forward, module)
    for wrapper in _functions(module, "forward"):
        forward = _bind(wrapper, forward)
    return forward(*args, **kwargs)


def _bind(wrapper: ForwardWrapper, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: wrapper(forward, *args, **kwargs)


def _install_forward(module: nn.Module) -> Callable[[], None]:
    if "forward" in module.__dict__:
        _ORIGINAL_FORWARDS[module] = module.__dict__["forward"]
    module.forward = MethodType(_dispatch_forward, module)

    def remove() -> None:
        original = _ORIGINAL_FORWARDS.pop(module, None)
        if original is None:
            del module.forward
        else:
            module.forward = original

    return remove


def _install_attributes(module: nn.Module) -> Callable[[], None]:
    """Replace the class by a subclass whose `context_attributes` are properties that call `get_attribute`."""
    original = type(module)
    module.__class__ = CONTEXT_CLASSES[original]

    def remove() -> None:
        module.__class__ = original

    return remove


def _remover(handle: RemovableHandle) -> Callable[[], None]:
    return handle.remove


_DISPATCHERS: dict[_Kind, Callable[[nn.Module], Callable[[], None]]] = {
    "pre": lambda module: _remover(module.register_forward_pre_hook(_dispatch_pre_hooks, with_kwargs=True)),
    "output": lambda module: _remover(module.register_forward_hook(_dispatch_output_hooks)),
    "forward": _install_forward,
    "attribute": _install_attributes,
}

CONTEXT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Class of a module → its subclass in which some attributes are properties that call `get_attribute`."""
