"""Masked scores of attention calls, and the place of an attention sink among the keys."""

from dataclasses import replace

import torch
from torch import Tensor

from cutaway.check.numerics import max_finite_abs
from cutaway.check.probes.op_tracer import AttentionCall

_MASKED_SCORE_GAP = 5_000.0
"""A finite score that is at least this far below the row's maximum may be masked. Masks add -1e4, -1e9, the lowest
finite number or -inf."""
_RANGE_MARGIN = 1.25
"""A score counts as masked if its distance to the row's maximum exceeds the range of q·k by this factor."""
_LOWEST_SCORE_RATIO = 0.99
"""A score below this fraction of the lowest number of its dtype is masked."""


def masked_scores(attention: AttentionCall) -> Tensor:
    """Boolean (B, H, T, S): True where a mask was added to a score.

    A score of -inf or of the lowest number of its dtype is masked. Any other score is masked only if it is further
    below the row's maximum than q·k explains, because large weights give finite scores that are far apart too.
    """
    scores = attention.scores.float()
    row_max = scores.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    lowest = scores <= _LOWEST_SCORE_RATIO * torch.finfo(attention.scores.dtype).min
    return lowest | (scores < row_max - max(_MASKED_SCORE_GAP, _RANGE_MARGIN * _score_range(attention, row_max)))


def _score_range(attention: AttentionCall, row_max: Tensor) -> float:
    """Upper estimate of the range of the scores without a mask.

    It is the range of q·k, times the scale of a fused kernel; the scale of an explicit softmax is assumed to be at most
    1. If q and k are unknown, it is twice the range that is symmetric about 0 and contains all row maxima.
    """
    if attention.q is None or attention.k is None:
        return 4 * max_finite_abs(row_max)
    q, k = attention.q.float(), attention.k.float()
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.ndim > 2 and k.shape[-3] != q.shape[-3] else k  # GQA
    products = q @ k.transpose(-1, -2)
    return float(products.amax() - products.amin()) * (1.0 if attention.scale is None else abs(attention.scale))


def move_sink_last(attention: AttentionCall) -> AttentionCall:
    """Return a call of causal self-attention with its attention sink, if it has one, as the last of T + 1 columns.

    transformers appends the sink to the keys; other libraries put it, or a learned or zero key, before them. The first
    query then attends to the first two columns, and not to the last one.
    """
    length = attention.scores.shape[-2]
    if length < 2 or attention.scores.shape[-1] != length + 1:
        return attention
    masked = masked_scores(attention)[..., 0, :]
    if bool(masked[..., :2].any()) or not bool(masked[..., -1].all()):
        return attention

    def move(keys: Tensor | None) -> Tensor | None:
        return keys.roll(-1, -2) if keys is not None and keys.shape[-2] == length + 1 else keys

    return replace(
        attention,
        scores=attention.scores.roll(-1, -1),
        pattern=attention.pattern.roll(-1, -1),
        k=move(attention.k),
        v=move(attention.v),
    )
