"""Validation of overrides: wrap user functions and report wrong outputs as `UserFunctionError`, not as model bugs."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, get_args

import torch
from torch import Tensor

from cutaway.check.adapters.module import extract_logits, extract_loss
from cutaway.check.checked_model import FUNCTION_FIELDS, ModelKind
from cutaway.errors import InputError

LOGITS_FUNCTIONS = {
    "logits": 0,
    "reference_logits": 0,
    "logits_with_mask": 0,
    "logits_with_positions": 0,
    "logits_with_documents": 0,
    "logits_with_labels": 0,
    "logits_with_filled_cache": 0,
    "logits_with_rolling_cache": 0,
    "logits_with_source": 2,
}
"""Functions that return logits → index of their tokens argument."""


GENERATE_FUNCTIONS = ("generate", "generate_padded", "generate_speculative")


INTEGER_FIELDS = (
    "vocab_size",
    "max_seq_len",
    "window",
    "num_layers",
    "source_vocab_size",
    "pad_token_id",
    "eos_token_id",
)


class UserFunctionError(Exception):
    """A function passed to `ct.check` has a wrong signature or output."""


def validate_override(name: str, value: Any) -> Any:
    """Validate an override; functions are wrapped so that their outputs are validated too."""
    if name == "kind" and value not in get_args(ModelKind):
        raise InputError(f"kind is {value!r}; pass one of {', '.join(get_args(ModelKind))}")
    if value is None:
        return None
    if name in INTEGER_FIELDS and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} is {value!r}; pass an integer")
    if name == "logits_by_kernel":
        if not isinstance(value, Mapping):
            raise InputError(
                f"{name} is a {type(value).__name__}; pass a dict of kernel names and functions tokens → logits"
            )
        return {kernel: _wrap_logits_function(f"{name}[{kernel!r}]", function, 0) for kernel, function in value.items()}
    if name in FUNCTION_FIELDS and name != "module" and not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}; pass a function")
    if name in LOGITS_FUNCTIONS:
        return _wrap_logits_function(name, value, LOGITS_FUNCTIONS[name])
    if name == "logits_with_cache":
        return _wrap_cache_function(value)
    if name == "loss":
        return _wrap_loss_function(value)
    return _wrap_generate_function(name, value) if name in GENERATE_FUNCTIONS else value


def _describe_value(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _call_user_function(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user function; a call that does not match its signature becomes a UserFunctionError."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if (
            error.__traceback__ is not None and error.__traceback__.tb_next is None
        ):  # raised by the call itself, not in the body
            raise UserFunctionError(f"{name}= cannot be called with {len(args)} arguments: {error}") from error
        raise


def _validate_logits(name: str, output: Any, tokens: Tensor) -> Tensor:
    output = extract_logits(output)
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != tokens.shape:
        shape = ", ".join(map(str, tokens.shape))
        raise UserFunctionError(
            f"{name}= returned {_describe_value(output)} for tokens of shape ({shape}); it must return logits of shape "
            f"({shape}, V)"
        )
    if not output.is_floating_point():
        raise UserFunctionError(f"{name}= returned dtype {output.dtype}; return floating-point logits")
    return output


def _wrap_logits_function(name: str, function: Any, tokens_index: int) -> Any:
    @wraps(function, updated=())
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return _validate_logits(name, _call_user_function(name, function, *args, **kwargs), args[tokens_index])

    return forward


def _wrap_cache_function(function: Any) -> Any:
    @wraps(function, updated=())
    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = _call_user_function("logits_with_cache", function, tokens, state)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise UserFunctionError(
                f"logits_with_cache= returned {_describe_value(out)}; it must return (logits, cache)"
            )
        if out[1] is None:
            raise UserFunctionError(
                "logits_with_cache= returned None as the cache, which means an empty cache; return the updated cache"
            )
        return _validate_logits("logits_with_cache", out[0], tokens), out[1]

    return step


def _wrap_loss_function(function: Any) -> Any:
    @wraps(function, updated=())
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        out = extract_loss(_call_user_function("loss", function, tokens, labels))
        out = torch.tensor(float(out)) if isinstance(out, float | int) else out
        if not isinstance(out, Tensor) or out.numel() != 1:
            raise UserFunctionError(f"loss= returned {_describe_value(out)}; it must return one number, the mean loss")
        return out.reshape(())

    return loss


def _wrap_generate_function(name: str, function: Any) -> Any:
    @wraps(function, updated=())
    def generate(*args: Any) -> Tensor:
        out = _call_user_function(name, function, *args)
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(args[0]) or out.is_floating_point():
            rows = len(args[0])
            raise UserFunctionError(
                f"{name}= returned {_describe_value(out)} for {rows} prompts; it must return tokens of shape "
                f"({rows}, n)"
            )
        return out

    return generate
