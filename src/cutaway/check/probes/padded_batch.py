"""Padded batches of sequences with different lengths: padding, masks, and selection of the real tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from cutaway.check.context import CheckContext
from cutaway.check.probes.masked_scores import masked_scores
from cutaway.check.probes.op_tracer import AttentionCall
from cutaway.check.report.finding import SkipCheckError

_MAX_PADDING = 5
"""Number of padding tokens in the shortest row, unless the model's maximum length is too small."""


def choose_lengths(ctx: CheckContext) -> tuple[int, int]:
    """Choose the length of a short row and the padded length of the batch."""
    seq_len = min(ctx.seq_len, 16)
    num_pads = min(_MAX_PADDING, seq_len - 2)
    if num_pads < 1:
        raise SkipCheckError(f"the model's maximum length is {ctx.model.max_seq_len}, too short for padding")
    return seq_len - num_pads, seq_len


def pad_rows(
    ctx: CheckContext, rows: list[Tensor], seq_len: int, side: str, pad_token_id: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pad rows (1, n) of different lengths to one batch; return tokens and mask (B, T).

    The default pad token is the model's pad token or, if it has none, the first token that is not special.
    """
    pad_token_id = ctx.model.pad_token_id if pad_token_id is None else pad_token_id
    pad_token_id = int(ctx.allowed_tokens[0]) if pad_token_id is None else pad_token_id
    tokens = torch.full((len(rows), seq_len), pad_token_id, dtype=rows[0].dtype, device=rows[0].device)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = row.shape[1]
        real = slice(seq_len - length, seq_len) if side == "left" else slice(0, length)
        tokens[index, real], mask[index, real] = row[0], True
    return tokens, mask


def select_real_tokens(output: Tensor, mask: Tensor) -> Tensor:
    """Select the outputs (N, V) of the tokens that are not padding.

    `output` may have fewer positions than `mask`: some models drop trailing positions that are padding in all rows.
    """
    return output[mask[:, : output.shape[1]]]


def random_ragged_rows(ctx: CheckContext) -> tuple[list[Tensor], int]:
    """Draw three random rows of different lengths; return them and the padded length, the length of the first row."""
    short_len, seq_len = choose_lengths(ctx)
    lengths = (seq_len, (short_len + seq_len) // 2, short_len)
    return [ctx.random_tokens(1, length) for length in lengths], seq_len


def locate_token(rows: list[Tensor], token_index: int) -> tuple[int, int]:
    """Row and position of the real token with this index among the real tokens of all rows."""
    for index, row in enumerate(rows):
        if token_index < row.shape[1]:
            return index, token_index
        token_index -= row.shape[1]
    raise IndexError(token_index)


def forward_rows_alone(rows: list[Tensor], forward: Callable[[Tensor], Tensor]) -> Tensor:
    """Run each row alone and concatenate the logits of all their tokens to (N, V)."""
    return torch.cat([forward(row)[0] for row in rows])


def masked_positions(attention: AttentionCall) -> Tensor:
    """Boolean (B, H, T, S): True where attention is masked. A weight of 0 from softmax underflow does not count."""
    return (attention.pattern == 0) & masked_scores(attention)
