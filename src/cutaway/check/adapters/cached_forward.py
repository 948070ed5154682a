"""Recognize how a forward function takes a KV cache, by its argument names, and build `logits_with_cache` from it.

| arguments | cache |
|---|---|
| `past_key_values` (and `use_cache`), `cache`, `kv_cache` … | passed, and returned with the logits |
| `start_pos` | kept in the module; the argument is the number of cached tokens |
| `input_pos` | kept in the module; the argument has the positions of the new tokens |
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cutaway.check.adapters.module import argument_names, extract_logits
from cutaway.check.checked_model import CachedForward, CheckedModel, require

_CACHE_ARGUMENTS = (
    "past_key_values",
    "past_key_value",
    "kv_cache",
    "kv_caches",
    "cache",
    "caches",
    "layer_past",
    "past",
)
_SETUP_METHODS = ("set_kv_cache", "setup_caches", "setup_cache")
_MAX_CACHE_LEN = 128


def add_cached_forward(checked: CheckedModel, function: Callable[..., Any]) -> None:
    """Set `checked.logits_with_cache` if the arguments of `function` are known, and a prompt and a new token work."""
    cached = _recognize(checked, function)
    if cached is None:
        return
    attributes = _copy_attributes(checked.module)
    if _works(cached, checked):
        checked.logits_with_cache = cached
    else:  # a cache that was set up may change forward passes without a cache
        _restore_attributes(attributes)


@contextmanager
def restore_cache(module: nn.Module | None) -> Iterator[None]:
    """On exit, remove the KV cache that the checks have set up in a module with one of the known methods."""
    has_setup = any(hasattr(module, name) for name in _SETUP_METHODS)
    attributes = _copy_attributes(module) if has_setup else {}
    try:
        yield
    finally:
        _restore_attributes(attributes)


def _restore_attributes(attributes: dict[nn.Module, dict[str, Any]]) -> None:
    for submodule, values in attributes.items():
        vars(submodule).clear()
        vars(submodule).update(values)


def _copy_attributes(module: nn.Module | None) -> dict[nn.Module, dict[str, Any]]:
    """The attributes of each submodule, with copies of its dicts of submodules, buffers and hooks."""
    return {
        submodule: {
            name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(submodule).items()
        }
        for submodule in (() if module is None else module.modules())
    }


def describe_cached_forward(function: Callable[..., Any] | None) -> str:
    """The keyword argument of `ct.check` that would test the KV cache of a function, as code."""
    names = [] if function is None else argument_names(function)
    name = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    if name is not None:
        flag = ", use_cache=True" if "use_cache" in names else ""
        call = f"model(tokens, {name}=cache{flag})"
    elif "start_pos" in names or "input_pos" in names:
        start = (
            "start_pos=cache or 0" if "start_pos" in names else "input_pos=(cache or 0) + torch.arange(tokens.shape[1])"
        )
        call = f"(model(tokens, {start}), (cache or 0) + tokens.shape[1])"
    else:
        call = "model(tokens, cache=cache)"
    return f"pass logits_with_cache=lambda tokens, cache: {call}, which returns (logits, cache); cache is None at first"


def _recognize(checked: CheckedModel, function: Callable[..., Any]) -> CachedForward | None:
    module = checked.module
    names = argument_names(function if module is None else module.forward)
    name = next((name for name in _CACHE_ARGUMENTS if name in names), None)
    flags = {"use_cache": True} if "use_cache" in names else {}
    if name is not None:
        return lambda tokens, cache: _split_output(function(tokens, **{name: cache}, **flags), name)
    if "start_pos" in names:

        def forward_from(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
            return extract_logits(function(tokens, start_pos=start or 0)), (start or 0) + tokens.shape[1]

        return forward_from
    if "input_pos" in names:

        def forward_at(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
            if start is None and module is not None:
                _set_up_cache(module, tokens)
            positions = (start or 0) + torch.arange(tokens.shape[1], device=tokens.device)
            return extract_logits(function(tokens, input_pos=positions)), (start or 0) + tokens.shape[1]

        return forward_at
    return None


def _split_output(output: object, name: str) -> tuple[Tensor, object]:
    """The logits and the cache in an output: the field with the name of the argument, or the item after the logits."""
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if value is None and isinstance(output, tuple | list):
        value = next((item for item in output[1:] if item is not None and not _is_loss_or_logits(item)), None)
    if value is None:
        raise ValueError(f"the output has no {name}")
    return extract_logits(output), value


def _is_loss_or_logits(item: object) -> bool:
    return isinstance(item, Tensor) and item.ndim < 4


def _set_up_cache(module: nn.Module, tokens: Tensor) -> None:
    """Call the module's own method that allocates a KV cache, with the arguments that it names."""
    method = next((getattr(module, name) for name in _SETUP_METHODS if hasattr(module, name)), None)
    if method is None:
        return
    param = next(module.parameters())
    values = {"batch_size": len(tokens), "max_batch_size": len(tokens), "device": param.device, "dtype": param.dtype}
    values |= dict.fromkeys(("max_seq_length", "max_seq_len", "decoder_max_seq_len"), _MAX_CACHE_LEN)
    before = set(module.modules())
    method(**{name: value for name, value in values.items() if name in argument_names(method)})
    for submodule in module.modules():
        if submodule not in before:  # a new module is in training mode
            submodule.training = module.training


def _works(cached: CachedForward, checked: CheckedModel) -> bool:
    """Whether a prompt of two tokens and one further token give logits of the right shape."""
    token = min(require(checked.vocab_size) - 1, 1)
    tokens = torch.full((1, 3), token, device=checked.device)
    try:
        first, cache = cached(tokens[:, :2], None)
        second, _ = cached(tokens[:, 2:], cache)
    except Exception:  # any exception means that the arguments have another meaning
        return False
    shapes = [
        logits.shape[:2] if isinstance(logits, Tensor) and logits.ndim == 3 else None for logits in (first, second)
    ]
    return cache is not None and shapes[0] in ((1, 2), (1, 1)) and shapes[1] == (1, 1)
