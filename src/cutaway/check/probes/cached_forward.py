"""Chunked forward passes with a KV cache, and their comparison with one forward pass without a cache."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cutaway.check.checked_model import require
from cutaway.check.context import CheckContext
from cutaway.check.numerics import Difference, difference_by_position
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.report.finding import MeasuredArray, SkipCheckError

UNSUPPORTED_ERRORS = (ValueError, NotImplementedError, AssertionError, TypeError)
"""Exceptions by which a model rejects unsupported arguments."""


def chunk_sizes(seq_len: int, chunk_size: int, first_chunk: int = 0) -> list[int]:
    """Sizes of the chunks of a sequence: `first_chunk` unless it is 0, chunks of `chunk_size`, and the remainder."""
    num_chunks, remainder = divmod(seq_len - first_chunk, chunk_size)
    return [first_chunk] * (first_chunk > 0) + [chunk_size] * num_chunks + [remainder] * (remainder > 0)


def forward_in_chunks(ctx: CheckContext, tokens: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Run a cached forward pass in chunks of these sizes; return the logits and their positions.

    The positions are needed, because some models return only the logits of a chunk's last token.
    """
    cache, start = None, 0
    logits: list[Tensor] = []
    positions: list[int] = []
    for size in sizes:
        out, cache = require(ctx.model.logits_with_cache)(tokens[:, start : start + size], cache)
        if out.shape[1] not in (1, size):
            raise SkipCheckError(f"for {size} tokens, logits_with_cache returned the logits of {out.shape[1]} tokens")
        start += size
        logits.append(out)
        positions += range(start - out.shape[1], start)
    return torch.cat(logits, 1), positions


def compare_in_chunks(
    ctx: CheckContext, tokens: Tensor, sizes: Sequence[int], full_logits: Tensor
) -> tuple[Difference, int, MeasuredArray]:
    """Compare the logits of a cached forward pass in chunks with `full_logits` of one forward pass.

    Returns the difference, the first position where it exceeds the tolerance (the first one compared, if none), and the
    difference by position.
    """
    out, positions = forward_in_chunks(ctx, tokens, sizes)
    diff = ctx.compare(
        lambda: ctx.logits(tokens)[:, positions],
        lambda: forward_in_chunks(ctx, tokens, sizes)[0],
        first_result=full_logits[:, positions],
        second_result=out,
    )
    by_position = [0.0] * tokens.shape[1]
    for position, value in zip(positions, difference_by_position(out, full_logits[:, positions]), strict=True):
        by_position[position] = value
    array = MeasuredArray(
        "lines",
        "Logits with KV cache − logits without, by position",
        "position",
        "largest absolute difference",
        [by_position],
        ["difference"],
        f"at most {diff.tolerance:.1e}, the tolerance for rounding",
    )
    return diff, positions[first_position_beyond(out, full_logits[:, positions], diff.tolerance)], array


def first_position_beyond(first: Tensor, second: Tensor, tolerance: float) -> int:
    """First position where two results (B, T, V) differ by more than the tolerance, or one is NaN; 0 if none."""
    exceeds = ~((first.float() - second.float()).abs().amax((0, 2)) <= tolerance)
    return int(exceeds.long().argmax())


def locate_divergence(ctx: CheckContext, tokens: Tensor, sizes: Sequence[int], position: int) -> str:
    """Text with `position`, where chunked and full logits differ, and the first module whose output differs there."""
    logits_with_cache, logits = require(ctx.model.logits_with_cache), ctx.logits
    cache, start = None, 0
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        start = end - size
        if position < end:
            break
        _, cache = logits_with_cache(tokens[:, start:end], cache)
    module = find_first_divergence(
        ctx,
        lambda: logits(tokens),
        lambda: logits_with_cache(tokens[:, start:end], cache),
        slice(position, position + 1),
        slice(position - start, position - start + 1),
    )
    return f"position {position}" + (f", first in {module}" if module else "")


def infer_wrong_position(ctx: CheckContext, tokens: Tensor, sizes: Sequence[int], expected_position: int) -> int | None:
    """Find the wrong position id that explains the cached logits of the token at `expected_position`.

    With this position id, a forward pass without a cache gives the logits that a cached pass over chunks of `sizes`
    gives. Return None if no candidate does.
    """
    logits_with_positions = ctx.model.logits_with_positions
    if logits_with_positions is None:
        return None
    out, positions = forward_in_chunks(ctx, tokens, sizes)
    max_seq_len = ctx.model.max_seq_len or expected_position + 2
    for candidate in dict.fromkeys((0, expected_position - 1, expected_position + 1, 1)):
        if candidate == expected_position or not 0 <= candidate < max_seq_len:
            continue
        position_ids = torch.arange(expected_position + 1, device=tokens.device).repeat(len(tokens), 1)
        position_ids[:, -1] = candidate
        try:
            shifted = logits_with_positions(tokens[:, : expected_position + 1], position_ids)[:, -1]
        except UNSUPPORTED_ERRORS:  # some models take only increasing positions
            continue
        actual = out[:, positions.index(expected_position)]
        if ctx.compare(lambda: shifted, lambda: actual).within_tolerance:
            return candidate
    return None
