"""What a user gives as a keyword is taken as it is meant, and what it cannot be is said by its name: a wrong adapter is
no bug of the model."""

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
"""Functions that give logits, and which of their arguments is the tokens."""


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
    """A function that was given as a keyword does not do what that keyword is for."""


def validate_override(name: str, value: Any) -> Any:
    """One keyword's value, which says by itself where it is not what it should be."""
    if name == "kind" and value not in get_args(ModelKind):
        raise InputError(f"kind is {value!r}; it is one of {', '.join(get_args(ModelKind))}")
    if value is None:
        return None
    if name in INTEGER_FIELDS and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} is {value!r}; it is a whole number")
    if name == "logits_by_kernel":
        if not isinstance(value, Mapping):
            raise InputError(f"{name} is a {type(value).__name__}; give a dict of names and functions tokens → logits")
        return {kernel: _wrap_logits_function(f"{name}[{kernel!r}]", each, 0) for kernel, each in value.items()}
    if name in FUNCTION_FIELDS and name != "module" and not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}; give a function")
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
    """The function's result; a call that its arguments do not allow is told as such."""
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # it did not even begin
            raise UserFunctionError(f"{name}= cannot be called with {len(args)} arguments: {error}") from error
        raise


def _validate_logits(name: str, output: Any, tokens: Tensor) -> Tensor:
    output = extract_logits(output)
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != tokens.shape:
        shape = ", ".join(map(str, tokens.shape))
        raise UserFunctionError(
            f"{name}= gave {_describe_value(output)} for tokens of shape ({shape}); it must give logits of shape "
            f"({shape}, V)"
        )
    if not output.is_floating_point():
        raise UserFunctionError(f"{name}= gave numbers of type {output.dtype}; logits are floating-point")
    return output


def _wrap_logits_function(name: str, function: Any, tokens_index: int) -> Any:
    @wraps(function, updated=())
    def ask(*args: Any, **kwargs: Any) -> Tensor:
        return _validate_logits(name, _call_user_function(name, function, *args, **kwargs), args[tokens_index])

    return ask


def _wrap_cache_function(function: Any) -> Any:
    @wraps(function, updated=())
    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        out = _call_user_function("logits_with_cache", function, tokens, state)
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise UserFunctionError(
                f"logits_with_cache= gave {_describe_value(out)}; it must give logits and the state after them"
            )
        if out[1] is None:
            raise UserFunctionError(
                "logits_with_cache= gave None as its state, which stands for a text that begins; give what it keeps"
            )
        return _validate_logits("logits_with_cache", out[0], tokens), out[1]

    return step


def _wrap_loss_function(function: Any) -> Any:
    @wraps(function, updated=())
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        out = extract_loss(_call_user_function("loss", function, tokens, labels))
        out = torch.tensor(float(out)) if isinstance(out, float | int) else out
        if not isinstance(out, Tensor) or out.numel() != 1:
            raise UserFunctionError(f"loss= gave {_describe_value(out)}; it must give one number, the mean loss")
        return out.reshape(())

    return loss


def _wrap_generate_function(name: str, function: Any) -> Any:
    @wraps(function, updated=())
    def write(*args: Any) -> Tensor:
        out = _call_user_function(name, function, *args)
        if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(args[0]) or out.is_floating_point():
            rows = len(args[0])
            raise UserFunctionError(
                f"{name}= gave {_describe_value(out)} for {rows} prompts; it must give tokens of shape ({rows}, n)"
            )
        return out

    return write
