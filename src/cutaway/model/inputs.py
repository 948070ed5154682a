"""Checks of what a caller passes in: one sentence that names the argument, its value and the limit.

Shapes and dtypes are always checked, for free. Values are looked at where that costs nothing that matters: not in a
compiled graph, and not for single tokens on an accelerator, where a look would stop the queue.
"""

from contextvars import ContextVar

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model.cache import Cache, Widths
from cutaway.model.masks import INTEGERS

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
KNOWN: ContextVar[bool] = ContextVar("known", default=False)
"""Set by whoever has looked at all values before sending them to a device."""


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


def check_prefix(prefix: Tensor, tokens: Tensor) -> Tensor:
    """One length for each row, from 0 to the number of tokens."""
    if torch.compiler.is_compiling():
        return prefix.long()
    if not isinstance(prefix, Tensor) or prefix.dtype not in INTEGERS or prefix.shape != (len(tokens),):
        shown = f"shape {tuple(prefix.shape)}, {prefix.dtype}" if isinstance(prefix, Tensor) else type(prefix).__name__
        raise InputError(f"prefix is {shown}; pass an integer tensor with one length for each of {len(tokens)} rows")
    check_range("prefix", prefix, tokens.shape[-1] + 1, f"the rows have {tokens.shape[-1]} tokens")
    return prefix.long()


def check_cache(cache: Cache, widths: list[Widths], name: str, batch: int) -> None:
    """A cache made by this model for this many rows."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(cache, Cache):
        raise InputError(f"cache is a {type(cache).__name__}; make one with model.new_cache(batch, length)")
    if cache.widths != widths:
        raise InputError("the cache was made for a model of another shape; make one with this model's new_cache")
    if batch != cache.batch:
        raise InputError(f"{name} has {batch} rows, but the cache was made for {cache.batch}")


def check_size(name: str, value: int) -> None:
    """A whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; give a whole number, 1 or more")


def check_dtype(dtype: torch.dtype | None) -> None:
    """A dtype that a model can be in."""
    if dtype is not None and dtype not in FLOATS:
        allowed = ", ".join(str(each) for each in FLOATS)
        raise InputError(f"dtype is {dtype!r}; a model can be in {allowed}")


def check_device(device: torch.device | str | None) -> torch.device:
    """The device, if it is here."""
    try:
        target = torch.device(device) if device is not None else torch.get_default_device()
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise InputError(f"device is {device!r}, which is not here: {str(error).splitlines()[0]}") from None
    return target


def check_seed(seed: int | None) -> None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise InputError(f"seed is {seed!r}; give a whole number from 0 to 2**63 - 1")


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
    """On the CPU always; elsewhere a look waits for the device, so not for single steps, nor where all is known."""
    if value.device.type == "cpu":
        return True
    known = KNOWN.get() or value.device.type == "meta"
    return not known and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
