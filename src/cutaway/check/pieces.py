"""A text that is read in pieces behind a cache, compared with one pass over it; and where the two part."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cutaway.check.exam import CannotError, Exam, Gap
from cutaway.check.where import first_difference

REFUSALS = (ValueError, NotImplementedError, AssertionError, TypeError)
"""How code says that it does not take something."""


def sized(length: int, piece: int, first: int = 0) -> list[int]:
    """A first piece, then pieces of one size, and the rest."""
    whole, rest = divmod(length - first, piece)
    return [first] * (first > 0) + [piece] * whole + [rest] * (rest > 0)


@torch.no_grad()
def read(exam: Exam, tokens: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The logits of a text that is read in pieces of these sizes, and their positions: some models give only those of
    a piece's last token."""
    assert exam.target.cached is not None
    state, start = None, 0
    found: list[Tensor] = []
    at: list[int] = []
    for size in sizes:
        out, state = exam.target.cached(tokens[:, start : start + size], state)
        if out.shape[1] not in (1, size):
            raise CannotError(f"of {size} tokens behind a cache it gave the logits of {out.shape[1]}")
        start += size
        found.append(out)
        at += range(start - out.shape[1], start)
    return torch.cat(found, 1), at


@torch.no_grad()
def in_pieces(exam: Exam, tokens: Tensor, sizes: Sequence[int], base: Tensor) -> tuple[Gap, int]:
    """What the pieces give against what one pass gave, and the first position where they part."""
    assert exam.target.logits is not None
    logits = exam.target.logits
    out, at = read(exam, tokens, sizes)
    gap = exam.same(lambda: logits(tokens)[:, at], lambda: read(exam, tokens, sizes)[0], first=base[:, at], second=out)
    return gap, at[first_far(out, base[:, at], gap.bound)]


def first_far(one: Tensor, other: Tensor, bound: float) -> int:
    """The first place of the second axis where two results are further apart than the bound (NaN is far)."""
    far = ~((one.float() - other.float()).abs().amax((0, 2)) <= bound)
    return int(far.long().argmax())


def where(exam: Exam, tokens: Tensor, sizes: Sequence[int], step: int) -> str:
    """The position at which the pieces first part from one pass, and the module in which that begins."""
    target = exam.target
    assert target.cached is not None
    assert target.logits is not None
    cached, logits = target.cached, target.logits
    state, begun = None, 0
    for end, size in zip(accumulate(sizes), sizes, strict=True):
        begun = end - size
        if step < end:
            break
        _, state = cached(tokens[:, begun:end], state)
    module = first_difference(
        exam,
        lambda: logits(tokens),
        lambda: cached(tokens[:, begun:end], state),
        slice(step, step + 1),
        slice(step - begun, step - begun + 1),
    )
    return f"position {step}" + (f", first in {module}" if module else "")


def seeming_position(exam: Exam, tokens: Tensor, sizes: Sequence[int], step: int) -> int | None:
    """The wrong position of one token that would explain its logits, if there is one."""
    placed = exam.target.placed
    if placed is None:
        return None
    out, at = read(exam, tokens, sizes)
    room = exam.target.longest or step + 2
    for position in dict.fromkeys((0, step - 1, step + 1, 1)):
        if position == step or not 0 <= position < room:
            continue
        places = torch.arange(step + 1, device=tokens.device).repeat(len(tokens), 1)
        places[:, -1] = position
        try:
            given = placed(tokens[:, : step + 1], places)[:, -1]
        except REFUSALS:  # some take rising positions only
            continue
        if exam.same(lambda: given, lambda: out[:, at.index(step)]).ok:
            return position
    return None
