"""Padded batches of sequences with different lengths: padding, masks, and selection of the real tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from cutaway.check.context import CheckContext, TensorFunction
from cutaway.check.numerics import NOISE_MARGIN, Difference, max_difference, max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.report.finding import SkipCheckError

CLEAR_DIFFERENCE_FACTOR = 100.0
"""A difference that exceeds the tolerance by this factor needs no noise measurement."""
MASKED_SCORE_GAP = -5_000.0
"""A score this far below the row's maximum is masked: masks use -1e4, -1e9, the lowest finite number or -inf."""
MAX_PADDING = 5
"""Padding tokens of the shortest row, if the maximum length allows them."""


def choose_lengths(context: CheckContext) -> tuple[int, int]:
    """Choose the length of a short row and the padded length of the batch."""
    seq_len = min(context.seq_len, 16)
    num_pads = min(MAX_PADDING, seq_len - 2)
    if num_pads < 1:
        raise SkipCheckError(f"its maximum length is {context.model.max_seq_len}, too short for padding")
    return seq_len - num_pads, seq_len


def choose_pad_token(context: CheckContext) -> int:
    """The pad token id; if the model has none, any token."""
    return context.model.pad_token_id if context.model.pad_token_id is not None else int(context.allowed_tokens[0])


def pad_rows(rows: list[Tensor], seq_len: int, side: str, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad rows (1, n) of different lengths to one batch; return tokens and mask (B, T)."""
    tokens = torch.full((len(rows), seq_len), pad_token_id, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = row.shape[1]
        real = slice(seq_len - length, seq_len) if side == "left" else slice(0, length)
        tokens[index, real], mask[index, real] = row[0], True
    return tokens, mask


def select_real_tokens(output: Tensor, mask: Tensor) -> Tensor:
    """Select the outputs of real tokens, (N, V). Some models drop columns that are padding in all rows."""
    return output[mask[:, : output.shape[1]]]


def random_ragged_rows(context: CheckContext, reserved: int = 0) -> tuple[list[Tensor], int]:
    """Three random rows of different lengths, the first without padding, and the padded length."""
    short_len, seq_len = choose_lengths(context)
    return [
        context.random_tokens(1, length)
        for length in (
            seq_len - reserved,
            max(1, (short_len + seq_len) // 2 - reserved),
            max(1, short_len - reserved),
        )
    ], seq_len


def locate_token(rows: list[Tensor], token_index: int) -> tuple[int, int]:
    """Row and position of a real token, by its index among the real tokens."""
    for index, row in enumerate(rows):
        if token_index < row.shape[1]:
            return index, token_index
        token_index -= row.shape[1]
    raise IndexError(token_index)


def forward_rows_alone(rows: list[Tensor], forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits of each row alone, concatenated to (N, V)."""
    return torch.cat([forward(row)[0] for row in rows])


@torch.no_grad()
def compare_expecting_difference(
    context: CheckContext, compute_first: TensorFunction, compute_second: TensorFunction, first_result: Tensor
) -> Difference:
    """Compare two results that must differ; a difference far beyond the noise skips the noise measurement."""
    diff, second_result = Difference(0.0, 0.0, ()), compute_second()
    if first_result.shape == second_result.shape and second_result.isfinite().all() and first_result.isfinite().all():
        diff = max_difference(first_result, second_result)
        diff.tolerance = (
            NOISE_MARGIN * context.noise_ratio * max(max_finite_abs(first_result), max_finite_abs(second_result))
        )
        if diff.max_abs > CLEAR_DIFFERENCE_FACTOR * diff.tolerance:
            return diff
    return context.compare(compute_first, compute_second, first_result=first_result)


def masked_positions(attention: AttentionCall) -> Tensor:
    """Masked entries of an attention call, (B, H, T, S); weights that only underflow are not masked."""
    scores = attention.scores.float()
    row_max = scores.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    return (attention.pattern == 0) & (scores - row_max < MASKED_SCORE_GAP)
