"""Validation of model inputs. Every error names the argument, its value and the limit.

Shapes and dtypes are always checked. Values are read only where that is cheap: not in a compiled graph, and not for
single tokens on an accelerator, where reading a value would synchronize with the device.
"""

from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model.cache import Cache, CacheShape
from cutaway.model.masks import INTEGER_DTYPES, TokenPositions
from cutaway.model.stack import Stack

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VALUES_CHECKED: ContextVar[bool] = ContextVar("values_checked", default=False)
"""Set by callers that have validated all values before sending them to a device."""


class StackInputs(NamedTuple):
    """Validated inputs of a stack."""

    tokens: Tensor
    mask: Tensor | None
    token_types: Tensor | None
    positions: Tensor | None
    document_ids: Tensor | None
    prefix_lengths: Tensor | None


def validate_inputs(
    stack: Stack,
    name: str,
    tokens: Tensor,
    mask: Tensor | None,
    *,
    vocab_size: int,
    token_types: Tensor | None,
    positions: Tensor | None,
    document_ids: Tensor | None,
    prefix_lengths: Tensor | None,
    cache: Cache | None,
) -> StackInputs:
    """Check all inputs of a stack; `name` is the argument that holds the tokens: tokens, source or target."""
    tokens = check_tokens(name, tokens, vocab_size)
    mask = check_same_shape("mask" if name == "tokens" else f"{name}_mask", mask, tokens, torch.bool)
    token_types = check_same_shape("token_types", token_types, tokens, torch.long)
    positions = check_same_shape("positions", positions, tokens, torch.long)
    document_ids = check_same_shape("document_ids", document_ids, tokens, torch.long)
    if positions is not None:
        check_positions(positions, mask, document_ids, increasing=stack.causal)
    if token_types is not None:
        if stack.embed.token_types is None:
            raise InputError("token_types were passed, but this model has no token types; leave them out")
        check_value_range(
            "token_types", token_types, stack.embed.token_types.num_embeddings, "that is not a token type of this model"
        )
    if prefix_lengths is not None:
        prefix_lengths = check_prefix_lengths(prefix_lengths, tokens)
    if cache is not None:
        if document_ids is not None or positions is not None or prefix_lengths is not None:
            raise InputError(
                "positions follow from the cache; leave out positions, document_ids and prefix_lengths, or the cache"
            )
        check_cache(cache, stack.cache_shapes, name, len(tokens))
        if not stack.causal and cache.max_len:
            raise InputError(
                "an encoder is bidirectional, so a sequence cannot be continued; pass all its tokens at once"
            )
    return StackInputs(tokens, mask, token_types, positions, document_ids, prefix_lengths)


def validate_positions(stack: Stack, name: str, token_positions: TokenPositions, cache: Cache | None) -> None:
    """Check that positions are within the position table, and that a cached row does not cross a RoPE switch length."""
    positions = token_positions.position
    if cache is not None:
        for switch_length in stack.rope_switch_lengths:
            check_rope_switch(cache, positions.shape[-1], positions, switch_length)
    max_positions = getattr(stack.embed.position, "max_positions", None)
    if max_positions is not None:
        check_max_position(positions, max_positions, name)


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
    if can_read_values(tokens):
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"{name} holds the id {bad}; the vocabulary has ids 0 to {vocab_size - 1}")
    return tokens.long()


def check_same_shape(name: str, value: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Check a per-token tensor: the shape of `tokens`, and bool (mask) or integer (positions, ids)."""
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
    if value.dtype not in INTEGER_DTYPES:
        raise InputError(f"{name} has dtype {value.dtype}; it must hold integers")
    return value.long()


def check_value_range(name: str, value: Tensor, limit: int, reason: str) -> None:
    """Check that all values are in [0, limit), where values can be read."""
    if not torch.compiler.is_compiling() and can_read_values(value):
        low, high = (int(number) for number in torch.aminmax(value))
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; {reason}, so give 0 to {limit - 1}")


def check_max_position(positions: Tensor, max_positions: int, name: str) -> None:
    """Check that no token is beyond the position table."""
    if torch.compiler.is_compiling() or not (positions.shape[-1] > max_positions or can_read_values(positions)):
        return
    last = int(positions.max()) + 1
    if last > max_positions:
        raise InputError(
            f"{name} needs position {last - 1}, but the model has positions 0 to {max_positions - 1} only; shorten it"
        )


def check_positions(positions: Tensor, mask: Tensor | None, document_ids: Tensor | None, *, increasing: bool) -> None:
    """Check that positions are not negative and, in a decoder, increase along each document (the mask follows them)."""
    if torch.compiler.is_compiling() or not can_read_values(positions):
        return
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    if bool((positions < 0)[real].any()):
        raise InputError(f"positions holds {int(positions[real].min())}; positions count from 0")
    is_start = torch.zeros_like(real) if document_ids is None else document_ids != document_ids.roll(1, -1)
    offset = is_start.cumsum(-1) * (int(positions.max()) + 1)  # documents one after another: all must increase
    max_so_far = torch.where(real, positions + offset, -1).cummax(-1).values
    if increasing and bool((real[:, 1:] & ((positions + offset)[:, 1:] <= max_so_far[:, :-1])).any()):
        raise InputError(
            "positions do not increase along a row; number the tokens of a sequence in order, and pass document_ids for"
            " packed documents"
        )


def check_prefix_lengths(prefix_lengths: Tensor, tokens: Tensor) -> Tensor:
    """Check one prefix length per row, from 0 to the number of tokens."""
    if torch.compiler.is_compiling():
        return prefix_lengths.long()
    if (
        not isinstance(prefix_lengths, Tensor)
        or prefix_lengths.dtype not in INTEGER_DTYPES
        or prefix_lengths.shape != (len(tokens),)
    ):
        shown = (
            f"shape {tuple(prefix_lengths.shape)}, {prefix_lengths.dtype}"
            if isinstance(prefix_lengths, Tensor)
            else type(prefix_lengths).__name__
        )
        raise InputError(
            f"prefix_lengths is {shown}; pass an integer tensor with one length for each of {len(tokens)} rows"
        )
    check_value_range(
        "prefix_lengths", prefix_lengths, tokens.shape[-1] + 1, f"the rows have {tokens.shape[-1]} tokens"
    )
    return prefix_lengths.long()


def check_cache(cache: Cache, cache_shapes: list[CacheShape], name: str, batch_size: int) -> None:
    """Check that the cache was allocated for this model and batch size."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(cache, Cache):
        raise InputError(
            f"cache is a {type(cache).__name__}; allocate one with model.new_cache(batch_size, max_seq_len)"
        )
    if cache.cache_shapes != cache_shapes:
        raise InputError(
            "the cache was allocated for a model of another shape; allocate one with this model's new_cache"
        )
    if batch_size != cache.batch_size:
        raise InputError(
            f"{name} has {batch_size} rows, but the cache has {cache.batch_size}; pass as many rows, or a new cache"
        )


def check_positive_int(name: str, value: int) -> None:
    """Check a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}; pass an integer of at least 1")


def check_dtype(dtype: torch.dtype | None) -> None:
    """Check a floating-point dtype."""
    if dtype is not None and dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(each) for each in FLOAT_DTYPES)
        raise InputError(f"dtype is {dtype!r}; use one of {allowed}")


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the torch device; raise if it is not available."""
    try:
        target = torch.device(device) if device is not None else torch.get_default_device()
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError, ImportError) as error:
        raise InputError(f"device {device!r} is not available: {str(error).splitlines()[0]}") from None
    return target


def check_seed(seed: int | None) -> None:
    """Check a seed for torch.manual_seed."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63):
        raise InputError(f"seed is {seed!r}; pass an integer from 0 to 2**63 - 1")


def check_rope_switch(cache: Cache, num_tokens: int, positions: Tensor, switch_length: int) -> None:
    """Check that no cached row grows past the length at which LongRoPE changes the angles of earlier keys."""
    if torch.compiler.is_compiling() or cache.max_len + num_tokens <= switch_length or cache.min_len > switch_length:
        return
    crosses = (cache.seq_lens > 0) & (cache.seq_lens <= switch_length) & (positions.amax(-1) >= switch_length)
    if bool(crosses.any()):
        raise InputError(
            f"row {int(crosses.long().argmax())} of the cache would grow past {switch_length} tokens, where LongRoPE"
            " changes the angles of all its tokens; prefill the whole sequence into a new cache"
        )


def can_read_values(value: Tensor) -> bool:
    """Whether values can be read cheaply: on the CPU; elsewhere not for single tokens, nor if already checked."""
    if value.device.type == "cpu":
        return True
    skip = VALUES_CHECKED.get() or value.device.type == "meta"
    return not skip and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
