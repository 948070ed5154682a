"""Texts of different lengths in one batch: how they are padded, and what is read back of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from cutaway.check.exam import MARGIN, CannotError, Exam, Gap, Make, apart, scale_of
from cutaway.check.witness import Attention

CLEARLY = 100.0
"""How far beyond the bound two results are apart for certain."""
LOW = -5_000.0
"""A score so far below its row's best is a mask's: code hides by -1e4, -1e9, the least number or -inf."""
PADS = 5
"""Padding tokens of the shortest row, where there is room."""


def sizes(exam: Exam) -> tuple[int, int]:
    """Tokens of the longest row, and of a batch that leaves room for padding."""
    width = min(exam.length, 16)
    pads = min(PADS, width - 2)
    if pads < 1:
        raise CannotError(f"it reads {exam.target.longest} tokens at most, which leaves no room for padding")
    return width - pads, width


def filler(exam: Exam) -> int:
    """The token that padding is made of."""
    return exam.target.pad if exam.target.pad is not None else int(exam.allowed[0])


def batch(rows: list[Tensor], width: int, side: str, pad: int) -> tuple[Tensor, Tensor]:
    """Rows (1, n) of different lengths as one batch, and its mask."""
    tokens = torch.full((len(rows), width), pad, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for n, row in enumerate(rows):
        size = row.shape[1]
        place = slice(width - size, width) if side == "left" else slice(0, size)
        tokens[n, place], mask[n, place] = row[0], True
    return tokens, mask


def real(out: Tensor, mask: Tensor) -> Tensor:
    """What was given for real tokens, (N, V). Some code leaves out what is padding at the end of every row."""
    return out[mask[:, : out.shape[1]]]


def ragged(exam: Exam, extra: int = 0) -> tuple[list[Tensor], int]:
    """Three rows, the first of which fills the batch."""
    short, width = sizes(exam)
    return [
        exam.text(1, n) for n in (width - extra, max(1, (short + width) // 2 - extra), max(1, short - extra))
    ], width


def place_of(rows: list[Tensor], at: int) -> tuple[int, int]:
    """The row and the position of the n-th real token."""
    for n, row in enumerate(rows):
        if at < row.shape[1]:
            return n, at
        at -= row.shape[1]
    raise IndexError(at)


def alone(rows: list[Tensor], logits: Callable[[Tensor], Tensor]) -> Tensor:
    """Each row's own logits, one after another."""
    return torch.cat([logits(row)[0] for row in rows])


@torch.no_grad()
def moves(exam: Exam, one: Make, other: Make, first: Tensor) -> Gap:
    """Compare two results that should differ. What is far beyond all noise needs no measure of it."""
    gap, b = Gap(0.0, 0.0, ()), other()
    if first.shape == b.shape and b.isfinite().all() and first.isfinite().all():
        gap = apart(first, b)
        gap.bound = MARGIN * exam.ratio * max(scale_of(first), scale_of(b))
        if gap.worst > CLEARLY * gap.bound:
            return gap
    return exam.same(one, other, first=first)


def masked_out(each: Attention) -> Tensor:
    """What a mask hides of an attention, (B, H, T, S); what only underflows is not hidden."""
    scores = each.scores.float()
    best = scores.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    return (each.pattern == 0) & (scores - best < LOW)
