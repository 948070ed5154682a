"""Validation of arguments that many functions share: integers, dtypes, devices, seeds, tensors of tokens.

Shapes and dtypes of tensors are always checked, except in a compiled graph. Values are read only where that is cheap.
"""

from contextvars import ContextVar

import torch
from torch import Tensor

from cutaway.errors import InputError

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
VALUES_CHECKED: ContextVar[bool] = ContextVar("values_checked", default=False)
"""Set to True by callers that have validated all values before sending them to a device."""


def check_positive_int(name: str, value: int) -> None:
    """Raise InputError unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; pass an integer of at least 1")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise InputError unless the dtype is None or one of FLOAT_DTYPES."""
    if dtype is not None and dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(each) for each in FLOAT_DTYPES)
        raise InputError(f"dtype is {dtype!r}; use one of {allowed}")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the torch device (PyTorch's default device for None). Raise InputError if the device is not available."""
    try:
        target = torch.device(device) if device is not None else torch.get_default_device()
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0][:100]
        raise InputError(f"device {device!r} is not available: {reason}; use cpu or cuda") from None
    return target


def check_seed(seed: int | None) -> None:
    """Raise InputError unless the seed is None or an integer from 0 to 2**63 - 1."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise InputError(f"seed is {seed!r}; pass an integer from 0 to 2**63 - 1")


def check_tokens(name: str, tokens: Tensor, vocab_size: int) -> Tensor:
    """Check that tokens are integers of shape (batch, length) within the vocabulary; return them as int64."""
    if torch.compiler.is_compiling():
        return tokens.long()
    if not isinstance(tokens, Tensor):
        raise InputError(f"{name} is a {type(tokens).__name__}; pass a tensor of token ids, shape (batch, length)")
    if tokens.dtype not in INTEGER_DTYPES:
        raise InputError(f"{name} has dtype {tokens.dtype}; token ids are integers, so pass an int64 tensor")
    if tokens.ndim != 2:
        hint = "; add the batch with tokens[None]" if tokens.ndim == 1 else ""
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; it must be (batch, length){hint}")
    if tokens.numel() == 0:
        raise InputError(f"{name} has shape {tuple(tokens.shape)}; pass at least one row of at least one token")
    check_value_range(name, tokens, vocab_size, f"the vocabulary has {vocab_size} ids")
    return tokens.long()


def check_same_shape(name: str, value: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Check that a tensor has the shape of `tokens` and holds bools if `dtype` is torch.bool, else integers.

    Return it, integers as int64. None is returned unchanged.
    """
    if value is None or torch.compiler.is_compiling():
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; pass a tensor of shape {tuple(tokens.shape)}")
    if value.shape != tokens.shape:
        raise InputError(f"{name} has shape {tuple(value.shape)}; it must be the tokens' shape, {tuple(tokens.shape)}")
    if dtype == torch.bool:
        if value.dtype != torch.bool:
            raise InputError(f"{name} has dtype {value.dtype}; it must be bool, False for padding: pass {name}.bool()")
        return value
    if value.dtype not in INTEGER_DTYPES:
        raise InputError(f"{name} has dtype {value.dtype}; it must hold integers")
    return value.long()


def check_value_range(name: str, value: Tensor, limit: int, reason: str) -> None:
    """Check that all values are in [0, limit). Skip the check if the values cannot be read cheaply."""
    if not torch.compiler.is_compiling() and values_are_readable(value):
        low, high = (int(number) for number in torch.aminmax(value))
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; {reason}, so pass 0 to {limit - 1}")


def check_max_position(positions: Tensor, max_positions: int, name: str) -> None:
    """Check that the position table has a row for every position."""
    if torch.compiler.is_compiling() or not (positions.shape[-1] > max_positions or values_are_readable(positions)):
        return
    last = int(positions.max()) + 1
    if last > max_positions:
        limit = max_positions - 1
        raise InputError(
            f"{name} needs position {last - 1}, but the model has positions 0 to {limit} only; pass a shorter sequence"
        )


def check_positions(positions: Tensor, mask: Tensor | None, document_ids: Tensor | None, *, increasing: bool) -> None:
    """Check that positions are not negative and, if `increasing`, increase along each document.

    In a decoder they must increase, because the causal mask is built from them.
    """
    if torch.compiler.is_compiling() or not values_are_readable(positions):
        return
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    if bool((positions < 0)[real].any()):
        raise InputError(f"positions holds {int(positions[real].min())}; positions are counted from 0")
    is_start = torch.zeros_like(real) if document_ids is None else document_ids != document_ids.roll(1, -1)
    # With this offset per document, positions must increase along the whole row.
    offset = is_start.cumsum(-1) * (int(positions.max()) + 1)
    max_so_far = torch.where(real, positions + offset, -1).cummax(-1).values
    if increasing and bool((real[:, 1:] & ((positions + offset)[:, 1:] <= max_so_far[:, :-1])).any()):
        raise InputError("positions do not increase along a row; for packed documents, pass document_ids too")


def check_prefix_lengths(prefix_lengths: Tensor, tokens: Tensor) -> Tensor:
    """Check that there is one prefix length per batch row, from 0 to its number of tokens; return them as int64."""
    if torch.compiler.is_compiling():
        return prefix_lengths.long()
    rows, length = tokens.shape
    if not isinstance(prefix_lengths, Tensor) or prefix_lengths.shape != (rows,):
        raise InputError(f"prefix_lengths must be a tensor of shape ({rows},): one length per row")
    if prefix_lengths.dtype not in INTEGER_DTYPES:
        raise InputError(f"prefix_lengths has dtype {prefix_lengths.dtype}; it must hold integers")
    check_value_range("prefix_lengths", prefix_lengths, length + 1, f"the rows have {length} tokens")
    return prefix_lengths.long()


def values_are_readable(value: Tensor) -> bool:
    """Whether to read the values of a tensor for validation.

    True on the CPU, except inside `torch.func` transforms, where values cannot be read. On other devices a read
    synchronizes, so single tokens are not read, and neither are tensors that the caller has validated (VALUES_CHECKED).
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    if value.device.type == "cpu":
        return True
    skip = VALUES_CHECKED.get() or value.device.type == "meta"
    return not skip and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
