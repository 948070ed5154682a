"""The inputs of a stack and their validation. Every error names the argument, its value and the limit."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cutaway import argument_checks as checks
from cutaway.errors import InputError
from cutaway.model.cache import Cache, CacheShape
from cutaway.model.head import PoolingHead
from cutaway.model.masks import TokenPositions
from cutaway.model.stack import Stack


class StackInputs(NamedTuple):
    """Inputs of a stack: token ids, and optional tensors of the same shape (`prefix_lengths`: one length per row)."""

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
    name, tokens, mask, token_types, positions, document_ids, prefix_lengths = stack_inputs
    tokens = checks.check_tokens(name, tokens, stack.vocab_size)
    mask = checks.check_same_shape("mask" if name == "tokens" else f"{name}_mask", mask, tokens, torch.bool)
    token_types = checks.check_same_shape("token_types", token_types, tokens, torch.long)
    positions = checks.check_same_shape("positions", positions, tokens, torch.long)
    document_ids = checks.check_same_shape("document_ids", document_ids, tokens, torch.long)
    if positions is not None:
        checks.check_positions(positions, mask, document_ids, increasing=stack.causal)
    if token_types is not None:
        if stack.embed.token_types is None:
            raise InputError("token_types were passed, but this model has no token types; leave them out")
        num_types = stack.embed.token_types.num_embeddings
        checks.check_value_range("token_types", token_types, num_types, "that is not a token type of this model")
    if prefix_lengths is not None:
        prefix_lengths = checks.check_prefix_lengths(prefix_lengths, tokens)
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
        checks.check_max_position(positions, max_positions, name)


def check_head_inputs(head: nn.Module | None, cache: Cache | None, document_ids: Tensor | None = None) -> None:
    """Raise if a head with one output per sequence gets a part of a sequence (a cache), or several in one row."""
    if not isinstance(head, PoolingHead):
        return
    if cache is not None:
        raise InputError(
            f"a cache was passed, but a {type(head).__name__} pools all tokens of a sequence; pass the whole"
            " sequences without a cache"
        )
    if document_ids is not None:
        raise InputError(
            f"document_ids were passed, but a {type(head).__name__} has one output per row; pass each document as"
            " a row of its own"
        )


def check_choices(tokens: Tensor) -> None:
    """Check that the tokens of a multiple-choice model have the shape (batch, choices, length)."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 3:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(
            f"tokens has shape {shape}; a multiple-choice head needs (batch, choices, length), one sequence per choice"
        )


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
            f"{name} has {batch_size} rows, but the cache has {cache.batch_size}; pass as many rows, or a new cache"
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
