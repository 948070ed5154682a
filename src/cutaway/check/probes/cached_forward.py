"""A text that is read in pieces behind a cache, compared with one pass over it; and where the two part."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.numerics import Difference
from cutaway.check.probes.first_divergence import find_first_divergence
from cutaway.check.report.finding import SkipCheckError

UNSUPPORTED_ERRORS = (ValueError, NotImplementedError, AssertionError, TypeError)
"""How code says that it does not take something."""


def chunk_sizes(seq_len: int, chunk_size: int, first_chunk: int = 0) -> list[int]:
    """A first piece, then pieces of one size, and the rest."""
    whole, rest = divmod(seq_len - first_chunk, chunk_size)
    return [first_chunk] * (first_chunk > 0) + [chunk_size] * whole + [rest] * (rest > 0)


@torch.no_grad()
def forward_in_chunks(context: CheckContext, tokens: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The logits of a text that is read in pieces of these sizes, and their positions: some models give only those of
    a piece's last token."""
    assert context.model.logits_with_cache is not None
    state, start = None, 0
    found: list[Tensor] = []
    at: list[int] = []
    for size in sizes:
        out, state = context.model.logits_with_cache(tokens[:, start : start + size], state)
        if out.shape[1] not in (1, size):
            raise SkipCheckError(f"of {size} tokens behind a cache it gave the logits of {out.shape[1]}")
        start += size
        found.append(out)
        at += range(start - out.shape[1], start)
    return torch.cat(found, 1), at


@torch.no_grad()
def compare_in_chunks(
    context: CheckContext, tokens: Tensor, sizes: Sequence[int], full_logits: Tensor
) -> tuple[Difference, int]:
    """What the pieces give against what one pass gave, and the first position where they part."""
    assert context.model.logits is not None
    logits = context.model.logits
    out, at = forward_in_chunks(context, tokens, sizes)
    gap = context.compare(
        lambda: logits(tokens)[:, at],
        lambda: forward_in_chunks(context, tokens, sizes)[0],
        first_result=full_logits[:, at],
        second_result=out,
    )
    return gap, at[first_position_beyond(out, full_logits[:, at], gap.tolerance)]


def first_position_beyond(first: Tensor, second: Tensor, tolerance: float) -> int:
    """The first place of the second axis where two results are further apart than the bound (NaN is far)."""
    far = ~((first.float() - second.float()).abs().amax((0, 2)) <= tolerance)
    return int(far.long().argmax())


def locate_divergence(context: CheckContext, tokens: Tensor, sizes: Sequence[int], position: int) -> str:
    """The position at which the pieces first part from one pass, and the module in which that begins."""
    target = context.model
    assert target.logits_with_cache is not None
    assert target.logits is not None
    cached, logits = target.logits_with_cache, target.logits
    state, begun = None, 0
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        begun = end - size
        if position < end:
            break
        _, state = cached(tokens[:, begun:end], state)
    module = find_first_divergence(
        context,
        lambda: logits(tokens),
        lambda: cached(tokens[:, begun:end], state),
        slice(position, position + 1),
        slice(position - begun, position - begun + 1),
    )
    return f"position {position}" + (f", first in {module}" if module else "")


def infer_wrong_position(
    context: CheckContext, tokens: Tensor, sizes: Sequence[int], expected_position: int
) -> int | None:
    """The wrong position of one token that would explain its logits, if there is one."""
    placed = context.model.logits_with_positions
    if placed is None:
        return None
    out, at = forward_in_chunks(context, tokens, sizes)
    room = context.model.max_seq_len or expected_position + 2
    for position in dict.fromkeys((0, expected_position - 1, expected_position + 1, 1)):
        if position == expected_position or not 0 <= position < room:
            continue
        places = torch.arange(expected_position + 1, device=tokens.device).repeat(len(tokens), 1)
        places[:, -1] = position
        try:
            given = placed(tokens[:, : expected_position + 1], places)[:, -1]
        except UNSUPPORTED_ERRORS:  # some take rising positions only
            continue
        if context.compare(lambda: given, lambda: out[:, at.index(expected_position)]).within_tolerance:
            return position
    return None
