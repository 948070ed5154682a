"""Validation of overrides: wrap user functions and report wrong outputs as `UserFunctionError`, not as model bugs."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from cutaway.check.adapters.module import extract_logits, extract_loss
from cutaway.check.checked_model import FUNCTION_FIELDS, ModelKind
from cutaway.check.numerics import Args
from cutaway.errors import InputError

_UserFunction = Callable[..., Any]
_INTEGER_FIELDS = (
    "vocab_size", "max_seq_len", "multiple", "window", "num_layers", "kv_heads", "source_vocab_size",
    "pad_token_id", "eos_token_id",
)  # fmt: skip


class UserFunctionError(Exception):
    """A function passed to `ct.check` has a wrong signature or output."""


def validate_override(name: str, value: object) -> object:
    """Validate a user's value of a `CheckedModel` field, and return it. A function is wrapped, so that its outputs are
    validated too."""
    if name == "kind" and value not in get_args(ModelKind):
        raise InputError(f"kind is {value!r}; pass one of {', '.join(get_args(ModelKind))}")
    if name == "padding_side" and value not in (None, "left", "right", "both"):
        raise InputError(f"padding_side is {value!r}; pass left, right or both")
    if value is None:
        return None
    if name in _INTEGER_FIELDS and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} is {value!r}; pass an integer")
    if name in ("multiple", "kv_heads") and isinstance(value, int) and value < 1:
        raise InputError(f"{name} is {value}, but it is a number of at least 1; pass a positive integer")
    if name == "logits_by_kernel":
        if not isinstance(value, Mapping):
            expected = "a dict of kernel names and functions tokens → logits"
            raise InputError(f"{name} is a {type(value).__name__}; pass {expected}")
        return {kernel: _wrap(f"{name}[{kernel!r}]", run, _validate_logits) for kernel, run in value.items()}
    if name not in FUNCTION_FIELDS or name == "module":
        return value
    if not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}; pass a function")
    return _wrap(name, value, _VALIDATORS[name]) if name in _VALIDATORS else value


def _wrap(name: str, function: _UserFunction, validate: Callable[[str, Any, Args], object]) -> _UserFunction:
    """Wrap a user's function: wrong outputs, and calls that do not match its signature, raise UserFunctionError."""

    def validated(*args: Any) -> object:
        try:
            out = function(*args)
        except TypeError as error:
            traceback = error.__traceback__
            if traceback is not None and traceback.tb_next is None:  # raised by the call itself, not in the body
                raise UserFunctionError(f"{name}= cannot be called with {len(args)} arguments: {error}") from error
            raise
        return validate(name, out, args)

    return validated


def describe_value(value: object) -> str:
    """Text for a message: the shape of a tensor, or the type of any other value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _validate_logits(name: str, output: object, args: Args) -> Tensor:
    output, tokens = extract_logits(output), args[2 if name == "logits_with_source" else 0]
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != tokens.shape:
        shape = ", ".join(map(str, tokens.shape))
        message = f"{name}= returned {describe_value(output)} for tokens of shape ({shape})"
        raise UserFunctionError(f"{message}; it must return a torch.Tensor of logits ({shape}, V)")
    if not output.is_floating_point():
        raise UserFunctionError(f"{name}= returned dtype {output.dtype}; return floating-point logits")
    return output


def _validate_cached(name: str, output: object, args: Args) -> tuple[Tensor, object]:
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise UserFunctionError(f"{name}= returned {describe_value(output)}; it must return (logits, cache)")
    logits, cache = output
    if cache is None:
        problem = "returned None as the cache, which means an empty cache"
        raise UserFunctionError(f"{name}= {problem}; return the updated cache")
    return _validate_logits(name, logits, args), cache


def _validate_loss(name: str, output: object, _args: Args) -> Tensor:
    loss = extract_loss(output)
    loss = torch.tensor(float(loss)) if isinstance(loss, float | int) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserFunctionError(f"{name}= returned {describe_value(loss)}; it must return one number, the mean loss")
    return loss.reshape(())


def _validate_tokens(name: str, output: object, args: Args) -> Tensor:
    rows = len(args[0])
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != rows or output.is_floating_point():
        message = f"{name}= returned {describe_value(output)} for {rows} prompts"
        raise UserFunctionError(f"{message}; it must return tokens of shape ({rows}, n)")
    return output


def _validate_layers(name: str, output: object, args: Args) -> list[Tensor]:
    """Validate the outputs of `hidden_states` and `attentions`: one tensor per layer."""
    batch_size, seq_len = args[0].shape
    ndim, shape = 3, f"({batch_size}, {seq_len}, d)"
    if name == "attentions":
        ndim, shape = 4, f"({batch_size}, heads, {seq_len}, {seq_len})"
    layers = list(output) if isinstance(output, tuple | list) else []
    wrong = [x for x in layers if not isinstance(x, Tensor) or x.ndim != ndim or not x.is_floating_point()]
    wrong += [x for x in layers if not wrong and (len(x) != batch_size or x.shape[ndim - 2] != seq_len)]
    if wrong or len(layers) < (2 if name == "hidden_states" else 1):
        problem = f"a list with {describe_value(wrong[0])}" if wrong else describe_value(output)
        count = "one before the first block and one per block" if name == "hidden_states" else "one per layer"
        message = f"{name}= returned {problem}; it must return a list of floating-point tensors of shape {shape}"
        raise UserFunctionError(f"{message}, {count}")
    return layers


_LOGITS_FUNCTIONS = [
    "logits",
    "reference_logits",
    *(name for name in FUNCTION_FIELDS if name.startswith("logits_with_")),
]
_VALIDATORS: dict[str, Callable[[str, Any, Args], object]] = {
    **dict.fromkeys(_LOGITS_FUNCTIONS, _validate_logits),
    **dict.fromkeys(("generate", "generate_padded", "generate_speculative"), _validate_tokens),
    "logits_with_cache": _validate_cached,
    "logits_with_padded_cache": _validate_cached,
    "loss": _validate_loss,
    "hidden_states": _validate_layers,
    "attentions": _validate_layers,
}
