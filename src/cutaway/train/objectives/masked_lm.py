"""Masked language modeling of single tokens (BERT) or spans (SpanBERT). The mask depends on seed and data position."""

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
"""Fractions of masked tokens that become the mask token and a random token. The rest stay unchanged."""


MAX_SPAN_LENGTH, SPAN_STOP_PROBABILITY = 10, 0.2
"""After each token, a span continues with probability 1 − SPAN_STOP_PROBABILITY, up to MAX_SPAN_LENGTH tokens
(SpanBERT, 2020). Spans have 4.5 tokens on average."""


SELECT_STREAM, REPLACE_STREAM, RANDOM_TOKEN_STREAM, SPAN_LENGTH_STREAM = range(4)
"""Ids of independent random number streams, for token selection, kind of replacement, random token, span length."""


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
    """Masked language modeling (BERT, 2018): the model predicts the original token at each masked position.

    Each token that is neither padding nor special is masked with probability `mlm_probability`, alone or in a span. Of
    the masked tokens, 80 % become the mask token, 10 % become a random token and 10 % stay unchanged. The mask of row b
    depends only on (seed, positions[b]).
    """
    if not 0 < mlm_probability < 1:
        raise InputError(
            f"mlm_probability is {mlm_probability}; it is the fraction of masked tokens, so pass a number in (0, 1)"
        )
    if len(positions) != len(tokens):
        raise InputError(
            f"positions has {len(positions)} items, but tokens has {len(tokens)} rows; pass one position per row"
        )
    noise = _MaskingNoise(seed, [int(position) for position in positions], tokens)
    # `replacement`, a number in [0, 1), determines what a masked token becomes.
    is_masked, replacement = (
        noise.span_mask(mlm_probability)
        if span_masking
        else (noise.uniform(SELECT_STREAM) < mlm_probability, noise.uniform(REPLACE_STREAM))
    )
    special = torch.tensor(sorted(special_ids), dtype=tokens.dtype, device=tokens.device)
    is_masked = is_masked & ~torch.isin(tokens, special)
    if mask is not None:
        is_masked = is_masked & mask
    random_tokens = (noise.uniform(RANDOM_TOKEN_STREAM) * vocab_size).to(tokens.dtype)
    becomes_mask = is_masked & (replacement < MASK_TOKEN_SHARE)
    becomes_random = (
        is_masked & (replacement >= MASK_TOKEN_SHARE) & (replacement < MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE)
    )
    inputs = torch.where(becomes_mask, mask_id, tokens)
    inputs = torch.where(becomes_random, random_tokens, inputs)
    model_kwargs = {} if document_ids is None else document_kwargs(document_ids)
    if mask is not None and (padding_mask := drop_full_mask(mask)) is not None:
        model_kwargs["mask"] = padding_mask
    return Objective((inputs,), tokens, is_masked.float(), model_kwargs)


class _MaskingNoise:
    """Uniform random numbers in [0, 1) for each token, determined by seed, data position of the row and token index."""

    def __init__(self, seed: int, positions: list[int], tokens: Int[Tensor, "B T"]) -> None:
        rows = [derive_seed(seed, position) for position in positions]
        self.row_seeds = torch.tensor(rows, dtype=torch.int64, device=tokens.device).unsqueeze(-1)
        self.seq_len = tokens.shape[-1]

    def uniform(self, stream: int, left_context: int = 0) -> Float[Tensor, "B T"]:
        """Random numbers from the stream with id `stream`, one per token.

        Each row starts with `left_context` additional numbers, for the positions before the first token.
        """
        columns = torch.arange(-left_context, self.seq_len, device=self.row_seeds.device).expand(
            len(self.row_seeds), -1
        )
        return uniform(self.row_seeds.expand_as(columns), columns, stream)

    def span_mask(self, mlm_probability: float) -> tuple[Bool[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Return which tokens are in a span, and a random number per token that is the same for all tokens of a span.

        A token in several spans belongs to the span with the nearest start. Spans may start left of the row, so that
        the first tokens of a row are masked as often as all others.
        """
        context = MAX_SPAN_LENGTH - 1
        starts = self.uniform(SELECT_STREAM, context) < _span_start_rate(mlm_probability)
        length_draws = self.uniform(SPAN_LENGTH_STREAM, context)
        replacements = self.uniform(REPLACE_STREAM, context)
        is_masked = torch.zeros_like(starts[:, context:])
        replacement = torch.ones_like(replacements[:, context:])
        for distance in reversed(range(MAX_SPAN_LENGTH)):
            # The columns that are `distance` to the left of each token
            shifted = slice(context - distance, context - distance + self.seq_len)
            reaches = starts[:, shifted] & (length_draws[:, shifted] < (1 - SPAN_STOP_PROBABILITY) ** distance)
            is_masked = is_masked | reaches
            replacement = torch.where(reaches, replacements[:, shifted], replacement)
        return is_masked, replacement


@lru_cache(maxsize=16)
def _span_start_rate(mlm_probability: float) -> float:
    """Probability q that a span starts at a token, chosen so that a fraction p of all tokens is in a span.

    p is `mlm_probability`, and q solves Π over k of (1 − q·(1 − s)^k) = 1 − p. Here k is the distance of a token to a
    span start on its left, s = SPAN_STOP_PROBABILITY, and (1 − s)^k is the probability that the span reaches the token.
    """
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection
        middle, not_in_span = (low + high) / 2, 1.0
        for distance in range(MAX_SPAN_LENGTH):
            not_in_span *= 1 - middle * (1 - SPAN_STOP_PROBABILITY) ** distance
        low, high = (middle, high) if 1 - not_in_span < mlm_probability else (low, middle)
    return high
