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

VALUES_CHECKED: ContextVar[bool] = ContextVar("values_checked", default=False)
"""Set to True by callers that have validated all values before sending them to a device."""


class StackInputs(NamedTuple):
    """Inputs of a stack: token ids, and optional tensors of the same shape (`prefix_lengths`: one per row)."""

    name: str
    """Name of the argument that holds the tokens ('tokens', 'source' or 'target'), for error messages."""
    tokens: Tensor
    mask: Tensor | None = None
    token_types: Tensor | None = None
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    prefix_lengths: Tensor | None = None


def validate_inputs(stack: Stack, stack_inputs: StackInputs, cache: Cache | None) -> StackInputs:
    """Check all inputs of a stack; return them with integer tensors converted to int64."""
    name, tokens = stack_inputs.name, check_tokens(stack_inputs.name, stack_inputs.tokens, stack.vocab_size)
    mask = check_same_shape("mask" if name == "tokens" else f"{name}_mask", stack_inputs.mask, tokens, torch.bool)
    token_types, positions, document_ids = (
        check_same_shape(field, getattr(stack_inputs, field), tokens, torch.long)
        for field in ("token_types", "positions", "document_ids")
    )
    prefix_lengths = stack_inputs.prefix_lengths
    if positions is not None:
        check_positions(positions, mask, document_ids, increasing=stack.causal)
    if token_types is not None:
        if stack.embed.token_types is None:
            raise InputError("token_types were passed, but this model has no token types; leave them out")
        num_types = stack.embed.token_types.num_embeddings
        check_value_range("token_types", token_types, num_types, "that is not a token type of this model")
    if prefix_lengths is not None:
        prefix_lengths = check_prefix_lengths(prefix_lengths, tokens)
    if cache is not None:
        if document_ids is not None or positions is not None or prefix_lengths is not None:
            raise InputError("a cache sets the positions; with it, pass no positions, document_ids or prefix_lengths")
        check_cache(cache, stack.cache_shapes, name, len(tokens))
        if not stack.causal and cache.max_len:
            raise InputError("an encoder is bidirectional and cannot continue a sequence; pass all its tokens at once")
    return StackInputs(name, tokens, mask, token_types, positions, document_ids, prefix_lengths)


def validate_positions(stack: Stack, name: str, token_positions: TokenPositions, cache: Cache | None) -> None:
    """Check that positions are in the position table, and that no cached row grows past a LongRoPE switch length."""
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
    check_value_range(name, tokens, vocab_size, f"the vocabulary has {vocab_size} ids")
    return tokens.long()


def check_same_shape(name: str, value: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Check that a per-token tensor has the shape of `tokens` and is bool (mask) or integer (positions, ids)."""
    if value is None or torch.compiler.is_compiling():
        return value
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; pass a tensor of shape {tuple(tokens.shape)}")
    if value.shape != tokens.shape:
        raise InputError(f"{name} has shape {tuple(value.shape)}; it must be that of the tokens, {tuple(tokens.shape)}")
    if dtype == torch.bool:
        if value.dtype != torch.bool:
            raise InputError(f"{name} has dtype {value.dtype}; it must be bool, False for padding: pass {name}.bool()")
        return value
    if value.dtype not in INTEGER_DTYPES:
        raise InputError(f"{name} has dtype {value.dtype}; it must hold integers")
    return value.long()


def check_value_range(name: str, value: Tensor, limit: int, reason: str) -> None:
    """Check that all values are in [0, limit). Skip the check if the values cannot be read cheaply."""
    if not torch.compiler.is_compiling() and can_read_values(value):
        low, high = (int(number) for number in torch.aminmax(value))
        if low < 0 or high >= limit:
            raise InputError(f"{name} holds {low if low < 0 else high}; {reason}, so pass 0 to {limit - 1}")


def check_max_position(positions: Tensor, max_positions: int, name: str) -> None:
    """Check that the position table has a row for every position."""
    if torch.compiler.is_compiling() or not (positions.shape[-1] > max_positions or can_read_values(positions)):
        return
    last = int(positions.max()) + 1
    if last > max_positions:
        limit = max_positions - 1
        raise InputError(f"{name} needs position {last - 1}, but the model has positions 0 to {limit} only; shorten it")


def check_positions(positions: Tensor, mask: Tensor | None, document_ids: Tensor | None, *, increasing: bool) -> None:
    """Check that positions are not negative and, if `increasing`, increase along each document.

    In a decoder they must increase, because the causal mask is built from them.
    """
    if torch.compiler.is_compiling() or not can_read_values(positions):
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
    """Check one prefix length per row, from 0 to the number of tokens."""
    if torch.compiler.is_compiling():
        return prefix_lengths.long()
    rows, length = tokens.shape
    if not isinstance(prefix_lengths, Tensor) or prefix_lengths.shape != (rows,):
        raise InputError(f"prefix_lengths must be a tensor of shape ({rows},): one length per row")
    if prefix_lengths.dtype not in INTEGER_DTYPES:
        raise InputError(f"prefix_lengths has dtype {prefix_lengths.dtype}; it must hold integers")
    check_value_range("prefix_lengths", prefix_lengths, length + 1, f"the rows have {length} tokens")
    return prefix_lengths.long()


def check_cache(cache: Cache, cache_shapes: list[CacheShape], name: str, batch_size: int) -> None:
    """Check that the cache was allocated for this model and batch size."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(cache, Cache):
        raise InputError(f"cache is a {type(cache).__name__}; allocate one with model.new_cache")
    if cache.cache_shapes != cache_shapes:
        raise InputError("the cache was allocated for another model; allocate one with new_cache of this model")
    if batch_size != cache.batch_size:
        raise InputError(
            f"{name} has {batch_size} rows, but the cache has {cache.batch_size}; pass as many, or a new cache"
        )


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
    """Whether values should be read: always on the CPU, elsewhere only for several tokens not checked before."""
    if value.device.type == "cpu":
        return True
    skip = VALUES_CHECKED.get() or value.device.type == "meta"
    return not skip and value.shape[-1] > 1 and not torch.cuda.is_current_stream_capturing()
