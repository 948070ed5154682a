"""Masked language modeling: single tokens (BERT) or spans (SpanBERT), a function of seed and position alone."""

from collections.abc import Collection, Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.sampling.rng import uniform
from cutaway.train.objectives.objective import Objective, document_kwargs, drop_full_mask
from cutaway.train.seeds import derive_seed

MASK_TOKEN_SHARE, RANDOM_TOKEN_SHARE = 0.8, 0.1
"""Of the hidden tokens, those that become the mask and those that become any token; the rest stay as they are."""


MAX_SPAN_LENGTH, SPAN_STOP_PROBABILITY = 10, 0.2
"""A span goes on with probability 1 − SPAN_STOP_PROBABILITY, up to MAX_SPAN_LENGTH tokens: 3.8 of them on average
(SpanBERT, 2020)."""


SELECT_STREAM, REPLACE_STREAM, RANDOM_TOKEN_STREAM, SPAN_LENGTH_STREAM = range(4)
"""Streams of random numbers: which tokens, what becomes of them, which other token, how long a span."""


def masked_lm(
    tokens: Int[Tensor, "B T"],
    document_ids: Int[Tensor, "B T"] | None = None,
    *,
    mask_id: int,
    vocab_size: int,
    special_ids: Collection[int] = (),
    mlm_probability: float = 0.15,
    seed: int,
    positions: Sequence[int] | Int[Tensor, " B"],
    span_masking: bool = False,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Objective:
    """Some tokens are hidden, and each one's own vector tells what it was (BERT, 2018).

    Each real token that is not special is hidden with probability `mlm_probability`, alone or in spans: 80 % become
    the mask, 10 % any token of the vocabulary, 10 % stay. Row b is a function of (seed, positions[b]) alone.
    """
    if not 0 < mlm_probability < 1:
        raise InputError(
            f"mlm_probability is {mlm_probability}; it is the share of hidden tokens, so give more than 0 and less"
            " than 1"
        )
    if len(positions) != len(tokens):
        raise InputError(f"there are {len(positions)} positions for {len(tokens)} rows; give each row's own")
    noise = _MaskingNoise(seed, [int(each) for each in positions], tokens)
    hidden, fate = (
        noise.span_mask(mlm_probability)
        if span_masking
        else (noise.uniform(SELECT_STREAM) < mlm_probability, noise.uniform(REPLACE_STREAM))
    )
    never = torch.tensor(sorted(special_ids), dtype=tokens.dtype, device=tokens.device)
    hidden = hidden & ~torch.isin(tokens, never)
    if mask is not None:
        hidden = hidden & mask
    other = (noise.uniform(RANDOM_TOKEN_STREAM) * vocab_size).to(tokens.dtype)
    shown = torch.where(hidden & (fate < MASK_TOKEN_SHARE), mask_id, tokens)
    shown = torch.where(
        hidden & (fate >= MASK_TOKEN_SHARE) & (fate < MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE), other, shown
    )
    beside = {} if document_ids is None else document_kwargs(document_ids)
    if mask is not None and (some := drop_full_mask(mask)) is not None:
        beside["mask"] = some
    return Objective((shown,), tokens, hidden.float(), beside)


class _MaskingNoise:
    """Random numbers from 0 to 1 for each token of each row, a function of (seed, the row's position, the column)."""

    def __init__(self, seed: int, positions: list[int], tokens: Int[Tensor, "B T"]) -> None:
        rows = [derive_seed(seed, position) for position in positions]
        self.row_seeds = torch.tensor(rows, dtype=torch.int64, device=tokens.device).unsqueeze(-1)
        self.seq_len = tokens.shape[-1]

    def uniform(self, stream: int, left_context: int = 0) -> Float[Tensor, "B T"]:
        """One for each column, and for `left_context` columns to the left of the first."""
        columns = torch.arange(-left_context, self.seq_len, device=self.row_seeds.device).expand(
            len(self.row_seeds), -1
        )
        return uniform(self.row_seeds.expand_as(columns), columns, stream)

    def span_mask(self, mlm_probability: float) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Which tokens lie in a span, and the fate that all of a span share: that of the nearest beginning.

        Spans may begin left of the row, so that its first tokens are hidden as often as all others.
        """
        before = MAX_SPAN_LENGTH - 1
        begins = self.uniform(SELECT_STREAM, before) < span_start_rate(mlm_probability)
        going = self.uniform(SPAN_LENGTH_STREAM, before)
        fates = self.uniform(REPLACE_STREAM, before)
        hidden = torch.zeros_like(begins[:, before:])
        fate = torch.ones_like(fates[:, before:])
        for back in reversed(range(MAX_SPAN_LENGTH)):
            from_there = slice(before - back, before - back + self.seq_len)
            reaches = begins[:, from_there] & (going[:, from_there] < (1 - SPAN_STOP_PROBABILITY) ** back)
            hidden, fate = hidden | reaches, torch.where(reaches, fates[:, from_there], fate)
        return hidden, fate


@lru_cache(maxsize=16)
def span_start_rate(mlm_probability: float) -> float:
    """How often spans must begin for a share p of all tokens to lie in one: Π over k of (1 − q·(1 − s)^k) = 1 − p.

    k is how far back a beginning is, s = SPAN_STOP_PROBABILITY, and (1 − s)^k how many spans come so far.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle, missed = (low + high) / 2, 1.0
        for back in range(MAX_SPAN_LENGTH):
            missed *= 1 - middle * (1 - SPAN_STOP_PROBABILITY) ** back
        low, high = (middle, high) if 1 - missed < mlm_probability else (low, middle)
    return high
