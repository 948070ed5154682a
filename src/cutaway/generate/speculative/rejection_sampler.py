"""Rejection sampling: which draft tokens are accepted, and the token that follows them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.sampling.logits_processing import apply_logits_processors, inverse_cdf_sample, logits_to_probs
from cutaway.generate.sampling.rng import uniform
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState
from cutaway.generate.speculative.draft_model import Proposal

ACCEPT_STREAM = 2
"""The stream of random numbers that acceptance is decided by."""


class RejectionSamplerOutput(NamedTuple):
    """What was made of a round's guesses."""

    tokens: Int64[Tensor, "n T"]
    """The accepted guesses, then the token that the model said after them; what follows that means nothing."""
    num_accepted: Int64[Tensor, " n"]
    invalid: Bool[Tensor, " n"]
    """The logits of the last token held NaN or +inf, or nothing was left to choose."""


def rejection_sample(
    logits: Float[Tensor, "n T V"], proposal: Proposal, state: SamplingState, features: SamplingFeatures
) -> RejectionSamplerOutput:
    """Accept or refuse guess by guess, and draw what comes after the accepted ones; `state` remembers what was said."""
    width = logits.shape[1]
    counts = torch.tensor(proposal.lengths, device=logits.device)
    guesses = torch.nn.functional.pad(proposal.tokens, (0, 1))
    said, accepted = guesses.clone(), torch.zeros_like(counts)
    going, bad = torch.ones_like(counts, dtype=torch.bool), torch.zeros_like(counts, dtype=torch.bool)
    for place in range(width):
        p = logits_to_probs(logits[:, place], state, features)
        fine = apply_logits_processors(logits[:, place], state, features).amax(-1).isfinite()
        guess, rest, good = guesses[:, place].unsqueeze(-1), p, torch.zeros_like(going)
        if place < width - 1:
            guessed = place < counts
            q = torch.zeros_like(p).scatter_(-1, guess, 1.0) if proposal.probs is None else proposal.probs[place]
            limit = uniform(state.int_params[:, 0], state.output_len, ACCEPT_STREAM) * q.gather(-1, guess).squeeze(-1)
            good = guessed & fine & (limit < p.gather(-1, guess).squeeze(-1))
            left = (p - q).clamp(min=0)
            # Where p and q are equal but for rounding nothing is left, and p is as good.
            rest = torch.where((guessed & (left.sum(-1) > 0)).unsqueeze(-1), left, p)
        own = inverse_cdf_sample(rest, uniform(state.int_params[:, 0], state.output_len))
        ends = going & ~good
        bad |= ends & ~fine
        said[:, place] = torch.where(ends, own, said[:, place])
        state.append_tokens(said[:, place], going, features)
        going &= good
        accepted += going
    return RejectionSamplerOutput(said, accepted, bad)


def expected_tokens(acceptance_rate: float, num_draft_tokens: int) -> float:
    """Tokens a pass if each guess is accepted with this chance: 1 + a + … + a^k = (1 − a^(k+1)) / (1 − a)."""
    if not 0 <= acceptance_rate <= 1 or num_draft_tokens < 0:
        raise InputError(
            f"acceptance_rate is {acceptance_rate!r} and num_draft_tokens {num_draft_tokens!r}; give a chance from 0 to"
            " 1, and 0 or more"
        )
    return sum(acceptance_rate**i for i in range(num_draft_tokens + 1))
