"""Rejection sampling of draft tokens, which preserves the target model's distribution."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.sampling.logits_processing import apply_logits_processors, inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.generate.speculative.draft_model import Proposal

_ACCEPT_STREAM = 2
"""Random stream of the accept decisions."""


class RejectionSamplerOutput(NamedTuple):
    """Tokens that one verification step of draft tokens appends to each row."""

    tokens: Int64[Tensor, "n T"]
    """Accepted draft tokens, then one token sampled with the target model. The rest of the row is undefined."""
    num_accepted: Int64[Tensor, " n"]
    invalid: Bool[Tensor, " n"]
    """True if the logits of the last token contain NaN or +inf, or if all tokens are suppressed."""


def rejection_sample(
    logits: Float[Tensor, "n T V"], proposal: Proposal, state: SamplingState, features: SamplingFeatures
) -> RejectionSamplerOutput:
    """Accept draft tokens in order, then sample one more token. All these tokens are appended to `state`.

    Draft token x is accepted if u · q(x) < p(x), where u is uniform in [0, 1): with probability min(1, p(x) / q(x)).
    The last token is sampled from max(p − q, 0) if a draft token was rejected, and from p if all were accepted.
    """
    width = logits.shape[1]
    num_drafts = torch.tensor(proposal.lengths, device=logits.device)
    draft_tokens = torch.nn.functional.pad(proposal.tokens, (0, 1))
    tokens, num_accepted = draft_tokens.clone(), torch.zeros_like(num_drafts)
    active, invalid = torch.ones_like(num_drafts, dtype=torch.bool), torch.zeros_like(num_drafts, dtype=torch.bool)
    for i in range(width):
        p = logits_to_probs(logits[:, i], state, features)
        valid = apply_logits_processors(logits[:, i], state, features).amax(-1).isfinite()
        draft, residual, accept = draft_tokens[:, i].unsqueeze(-1), p, torch.zeros_like(active)
        if i < width - 1:
            has_draft = i < num_drafts
            q = torch.zeros_like(p).scatter_(-1, draft, 1.0) if proposal.probs is None else proposal.probs[i]
            u = uniform(state.int_params[:, 0], state.output_len, _ACCEPT_STREAM)
            threshold = u * q.gather(-1, draft).squeeze(-1)
            accept = has_draft & valid & (threshold < p.gather(-1, draft).squeeze(-1))
            difference = (p - q).clamp(min=0)
            # If p equals q up to rounding, max(p − q, 0) is zero; sample from p then.
            residual = torch.where((has_draft & (difference.sum(-1) > 0)).unsqueeze(-1), difference, p)
        resampled = inverse_cdf_sample(residual, uniform(state.int_params[:, 0], state.output_len))
        stops = active & ~accept
        invalid |= stops & ~valid
        tokens[:, i] = torch.where(stops, resampled, tokens[:, i])
        state.append_tokens(tokens[:, i], active, features)
        active &= accept
        num_accepted += active
    return RejectionSamplerOutput(tokens, num_accepted, invalid)


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Expected number of tokens per forward pass of the target model: 1 + a + … + a^k.

    a is the acceptance rate of a draft token, k the number of draft tokens."""
    if not 0 <= acceptance_rate <= 1 or num_draft_tokens < 0:
        values = f"acceptance_rate is {acceptance_rate!r} and num_draft_tokens {num_draft_tokens!r}"
        raise InputError(f"{values}; pass a rate from 0 to 1, and a number of tokens, 0 or more")
    return sum(acceptance_rate**i for i in range(num_draft_tokens + 1))
