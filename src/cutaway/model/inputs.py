"""Checks of what a caller passes in: one sentence that names the argument, its value and the limit.

Shapes and dtypes are always checked, for free. Values are looked at where that costs nothing that matters: not in a
compiled graph, and not for single tokens on an accelerator, where a look would stop the queue.
"""

import torch
from torch import Tensor

from cutaway.errors import InputError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_tokens(name: str, tokens: Tensor, vocab_size: int) -> Tensor:
    """Integer tokens of shape (batch, length) with every id in the vocabulary, as int64."""
    if torch.compiler.is_compiling():
        return tokens.long()
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name} is a {type(tokens).__name__}; pass a tensor of token ids, shape (batch, length)")
    if tokens.dtype not in INTEGERS:
        raise InputError(f"{name} has dtype {tokens.dtype}; token ids are integers, so pass an int64 tensor")
    if tokens.ndim != 2:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; it must be (batch, length)" + add_batch(tokens))
    if tokens.numel() == 0:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; give at least one row of at least one token")
    if worth_a_look(tokens):
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"{name} holds the id {bad}; the vocabulary has ids 0 to {vocab_size - 1}")
    return tokens.long()


def add_batch(tokens: Tensor) -> str:
    return f"; add the batch with {'tokens[None]'}" if tokens.ndim == 1 else ""


def check_beside(name: str, value: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A tensor that goes with the tokens: same shape, and bool (a mask) or integer (positions, documents, types)."""
    if value is None or torch.compiler.is_compiling():
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; pass a tensor of shape {tuple(tokens.shape)}")
    if value.shape != tokens.shape:
        raise InputError(f"{name} has shape {tuple(value.shape)}; it must be that of the tokens, {tuple(tokens.shape)}")
    if dtype == torch.bool:
        if value.dtype != torch.bool:
            raise InputError(
                f"{name} has dtype {value.dtype}; it must be bool, True for real tokens: pass {name}.bool()"
            )
        return value
    if value.dtype not in INTEGERS:
        raise InputError(f"{name} has dtype {value.dtype}; it must hold integers")
    return value.long()


def check_range(name: str, value: Tensor, limit: int, what: str) -> None:
    """Every number below `limit` and none negative, where a look is free."""
    if not torch.compiler.is_compiling() and worth_a_look(value):
        low, high = (int(number) for number in torch.aminmax(value))
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; {what}, so give 0 to {limit - 1}")


def check_length(position: Tensor, limit: int, name: str) -> None:
    """No token behind the last learned position."""
    if torch.compiler.is_compiling() or not (position.shape[-1] > limit or worth_a_look(position)):
        return
    last = int(position.max()) + 1
    if last > limit:
        raise InputError(
            f"{name} needs position {last - 1}, but the model has learned positions 0 to {limit - 1}; shorten it"
        )


def worth_a_look(value: Tensor) -> bool:
    """On the CPU always; elsewhere a look waits for the device, so not for single steps."""
    if value.device.type == "cpu":
        return True
    return value.device.type != "meta" and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
