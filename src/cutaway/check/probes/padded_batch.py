"""Texts of different lengths in one batch: how they are padded, and what is read back of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from cutaway.check.context import CheckContext, TensorFunction
from cutaway.check.numerics import NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.report.finding import SkipCheckError

CLEAR_DIFFERENCE_FACTOR = 100.0
"""How far beyond the bound two results are apart for certain."""
MASKED_SCORE_GAP = -5_000.0
"""A score so far below its row's best is a mask's: code hides by -1e4, -1e9, the least number or -inf."""
MAX_PADDING = 5
"""Padding tokens of the shortest row, where there is room."""


def choose_lengths(context: CheckContext) -> tuple[int, int]:
    """Tokens of the longest row, and of a batch that leaves room for padding."""
    width = min(context.seq_len, 16)
    pads = min(MAX_PADDING, width - 2)
    if pads < 1:
        raise SkipCheckError(f"it reads {context.model.max_seq_len} tokens at most, which leaves no room for padding")
    return width - pads, width


def choose_pad_token(context: CheckContext) -> int:
    """The token that padding is made of."""
    return context.model.pad_token_id if context.model.pad_token_id is not None else int(context.allowed_tokens[0])


def pad_rows(rows: list[Tensor], seq_len: int, side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Rows (1, n) of different lengths as one batch, and its mask."""
    tokens = torch.full((len(rows), seq_len), pad_token_id, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for n, row in enumerate(rows):
        size = row.shape[1]
        place = slice(seq_len - size, seq_len) if side == "left" else slice(0, size)
        tokens[n, place], mask[n, place] = row[0], True
    return tokens, mask


def select_real_tokens(output: Tensor, mask: Tensor) -> Tensor:
    """What was given for real tokens, (N, V). Some code leaves out what is padding at the end of every row."""
    return output[mask[:, : output.shape[1]]]


def random_ragged_rows(context: CheckContext, reserved: int = 0) -> tuple[list[Tensor], int]:
    """Three rows, the first of which fills the batch."""
    short, width = choose_lengths(context)
    return [
        context.random_tokens(1, n)
        for n in (width - reserved, max(1, (short + width) // 2 - reserved), max(1, short - reserved))
    ], width


def locate_token(rows: list[Tensor], token_index: int) -> tuple[int, int]:
    """The row and the position of the n-th real token."""
    for n, row in enumerate(rows):
        if token_index < row.shape[1]:
            return n, token_index
        token_index -= row.shape[1]
    raise IndexError(token_index)


def forward_rows_alone(rows: list[Tensor], forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Each row's own logits, one after another."""
    return torch.cat([forward(row)[0] for row in rows])


@torch.no_grad()
def compare_expecting_difference(
    context: CheckContext, compute_first: TensorFunction, compute_second: TensorFunction, first_result: Tensor
) -> Difference:
    """Compare two results that should differ. What is far beyond all noise needs no measure of it."""
    gap, b = Difference(0.0, 0.0, ()), compute_second()
    if first_result.shape == b.shape and b.isfinite().all() and first_result.isfinite().all():
        gap = max_difference(first_result, b)
        gap.tolerance = NOISE_MARGIN * context.noise_ratio * max(max_finite_abs(first_result), max_finite_abs(b))
        if gap.max_abs > CLEAR_DIFFERENCE_FACTOR * gap.tolerance:
            return gap
    return context.compare(compute_first, compute_second, first_result=first_result)


def masked_positions(attention: AttentionCall) -> Tensor:
    """What a mask hides of an attention, (B, H, T, S); what only underflows is not hidden."""
    scores = attention.scores.float()
    best = scores.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    return (attention.pattern == 0) & (scores - best < MASKED_SCORE_GAP)
