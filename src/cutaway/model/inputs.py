"""Checks of what a caller passes in: one sentence that names the argument, its value and the limit.

Shapes and dtypes are always checked, for free. Values are looked at where that costs nothing that matters: not in a
compiled graph, and not for single tokens on an accelerator, where a look would stop the queue.
"""

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model.cache import Cache

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
        hint = "; add the batch with tokens[None]" if tokens.ndim == 1 else ""
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; it must be (batch, length){hint}")
    if tokens.numel() == 0:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; give at least one row of at least one token")
    if worth_a_look(tokens):
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"{name} holds the id {bad}; the vocabulary has ids 0 to {vocab_size - 1}")
    return tokens.long()


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


def check_positions(positions: Tensor, mask: Tensor | None, documents: Tensor | None, *, rising: bool) -> None:
    """No negative position; in a decoder they rise along each text, since what comes later is told by them."""
    if torch.compiler.is_compiling() or not worth_a_look(positions):
        return
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    if bool((positions < 0)[real].any()):
        raise InputError(f"positions holds {int(positions[real].min())}; positions count from 0")
    new = torch.zeros_like(real) if documents is None else documents != documents.roll(1, -1)
    text = new.cumsum(-1) * (int(positions.max()) + 1)  # texts one behind the other, so that all must rise
    so_far = torch.where(real, positions + text, -1).cummax(-1).values
    if rising and bool((real[:, 1:] & ((positions + text)[:, 1:] <= so_far[:, :-1])).any()):
        raise InputError(
            "positions do not rise along a row; number the tokens of a text in order, and texts by documents"
        )


def check_turn(cache: Cache, length: int, position: Tensor, turn: int) -> None:
    """No row of a cache grows past the length at which LongRoPE would have turned its earlier keys differently."""
    if torch.compiler.is_compiling() or cache.used + length <= turn or cache.least > turn:
        return
    crosses = (cache.length > 0) & (cache.length <= turn) & (position.amax(-1) >= turn)
    if bool(crosses.any()):
        raise InputError(
            f"row {int(crosses.long().argmax())} of the cache would grow past {turn} tokens, where LongRoPE turns the"
            " whole text by other angles; read the text again from its start into a new cache"
        )


def worth_a_look(value: Tensor) -> bool:
    """On the CPU always; elsewhere a look waits for the device, so not for single steps."""
    if value.device.type == "cpu":
        return True
    return value.device.type != "meta" and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
