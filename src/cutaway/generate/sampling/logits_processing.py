"""Logits processing and sampling: penalties, logit bias, temperature, top-k, top-p, min-p, inverse-CDF sampling.

The features that a batch uses are known on the host (`SamplingFeatures`), and no tensor value is read on the host, so
that a step can be captured in a CUDA graph or compiled as one graph. The order is that of transformers: repetition
penalty, presence and frequency penalties, logit bias and suppressed tokens, minimum length, grammar, temperature,
top-k, top-p, min-p.

Top-k and top-p compare tokens by sort key: the bits of (max logit − logit) / temperature, read as an int32. A more
likely token has a smaller sort key. A filter is a threshold, the largest sort key that it keeps.
"""

import math

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int32, Int64
from torch import Tensor

from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState

MAX_KEY = 2**31 - 1
"""Largest possible sort key. As a threshold it keeps all tokens."""
MASS_SCALE = 2.0**42
"""Fixed-point probability of the most likely token in top-p; those of other tokens are relative to it.

The sum over a million tokens fits in an int64."""


def apply_logits_processors(
    logits: Float[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Float[Tensor, "n V"]:
    """Apply penalties, logit bias and minimum length. NaN stays NaN: values are added, never overwritten."""
    if not features.modifies_logits:
        return logits
    x = logits.float()
    if features.repetition_penalty and state.seen_mask is not None:
        penalty = state.float_param(3)
        x = torch.where(state.seen_mask, torch.where(x < 0, x * penalty, x / penalty), x)
    if features.count_penalties and state.output_counts is not None:
        x = x - state.float_param(4) * (state.output_counts > 0) - state.float_param(5) * state.output_counts
    if features.logit_bias and state.logit_bias is not None:
        x = x + state.logit_bias
    if features.min_new_tokens and state.stop_token_mask is not None:
        too_short = (state.output_len < state.int_params[:, 2]).unsqueeze(-1)
        x = x + torch.zeros_like(x).masked_fill(state.stop_token_mask & too_short, -math.inf)
    if features.grammar and state.grammar_bitmask is not None:
        x = mask_by_grammar(x, state.grammar_bitmask)
    return x


def mask_by_grammar(x: Float[Tensor, "*n V"], bitmask: Int32[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
    """Add −inf to the logits of the tokens whose bit is 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    is_allowed = ((bitmask.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., : x.shape[-1]].bool()
    return x + torch.zeros_like(x).masked_fill(~is_allowed, -math.inf)


def unnormalized_probs(
    x: Float[Tensor, "n V"], max_logits: Float[Tensor, " n"], state: SamplingState, features: SamplingFeatures
) -> Float32[Tensor, "n V"]:
    """Return exp((x − max_logits) / temperature), and 0 for tokens that top-k, top-p or min-p removes."""
    temperature = state.float_param(0)
    x = (x.float() - max_logits.float().unsqueeze(-1)) / torch.where(temperature > 0, temperature, 1)
    weight = x.exp()
    keep = _top_k_top_p_mask(x, weight, state, features) if features.top_k_window else None
    if features.min_p:  # relative to the most likely token, whose weight is 1
        above_min_p = weight >= state.float_param(2)
        keep = above_min_p if keep is None else keep & above_min_p
    return weight if keep is None else torch.where(keep, weight, 0)


def _top_k_top_p_mask(
    x: Float32[Tensor, "n V"], weight: Float32[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Bool[Tensor, "n V"]:
    """Mask of the tokens that top-k and then top-p keep.

    Top-k keeps all tokens that tie with the k-th; of tokens that tie at the top-p threshold, those with smaller ids are
    kept. Tokens are compared by value, not by their order after a sort, and probabilities are added as integers, whose
    sum is the same in any order. The result therefore depends neither on the batch nor on the device.
    """
    key = x.view(torch.int32) & MAX_KEY  # x ≤ 0, so the bits of |x|, as an integer, increase as x decreases
    top_k_key, nearest_keys = top_k_threshold(key, state, features)
    if not features.top_p:
        return key <= top_k_key
    total = (_fixed_point_mass(weight) * (key <= top_k_key)).sum(-1, keepdim=True)
    threshold, num_ties = top_p_threshold(key, top_k_key, nearest_keys, total, state)
    is_tie = key == threshold
    return (key < threshold) | (is_tie & (is_tie.cumsum(-1) <= num_ties))


def top_k_threshold(
    key: Int[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n k"] | None]:
    """Return, per row, the largest sort key that top-k keeps, and the `top_k_window` smallest sort keys, ascending.

    The smallest sort keys are None if the top-k window is as large as the vocabulary."""
    top_k = state.int_params[:, 1:2].contiguous()
    if features.top_k_window < key.shape[-1]:
        nearest_keys = key.topk(features.top_k_window, largest=False).values
        top_k_key = nearest_keys.gather(-1, top_k.clamp(max=features.top_k_window) - 1)
        return top_k_key.masked_fill(top_k > features.top_k_window, MAX_KEY), nearest_keys
    if features.top_k:
        return _threshold_of_unsorted_keys(key, torch.ones_like(key, dtype=torch.int64), top_k)[0], None
    return torch.full_like(key[:, :1], MAX_KEY), None


def top_p_threshold(
    key: Int[Tensor, "n V"],
    top_k_key: Int[Tensor, "n 1"],
    nearest_keys: Int[Tensor, "n k"] | None,
    total_mass: Int64[Tensor, "n 1"],
    state: SamplingState,
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """Return, per row, the largest sort key that top-p keeps, and how many of the tokens with this sort key it keeps.

    Only tokens with sort keys up to `top_k_key` are considered. `nearest_keys` holds the smallest sort keys, ascending.
    `total_mass` is the sum of the fixed-point probabilities of the tokens considered."""
    top_p = state.float_params[:, 1:2]
    target = (top_p * total_mass).ceil().long()
    if nearest_keys is not None:
        masses = _mass_of_key(nearest_keys) * (nearest_keys <= top_k_key)
        threshold, mass_below = _threshold_of_sorted_keys(nearest_keys, masses, target)
    else:
        threshold, mass_below = _threshold_of_unsorted_keys(key, _mass_of_key(key) * (key <= top_k_key), target)
    tie_mass = _mass_of_key(threshold).clamp(min=1)
    num_ties = (target - mass_below + tie_mass - 1) // tie_mass
    return torch.where(top_p < 1, threshold, top_k_key), torch.where(top_p < 1, num_ties, key.shape[-1])


def _mass_of_key(key: Int[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """Fixed-point probability, relative to that of the most likely token, of a token with this sort key."""
    return _fixed_point_mass((-key.view(torch.float32)).exp())


def _fixed_point_mass(weight: Float32[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """Convert unnormalized probabilities, of which the largest is 1, to fixed-point integers."""
    return (weight.double() * MASS_SCALE).long()


def _threshold_of_sorted_keys(
    key: Int[Tensor, "n k"], mass: Int64[Tensor, "n k"], target: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """Return, per row, the sort key at which the cumulative sum of `mass` reaches `target`.

    Return also the sum of `mass` over all smaller sort keys. `key` holds sort keys in ascending order. `mass` holds the
    fixed-point probability of each key (top-p), or ones (top-k)."""
    index = torch.searchsorted(mass.cumsum(-1), target).clamp(max=key.shape[-1] - 1)
    threshold = key.gather(-1, index)
    return threshold, (mass * (key < threshold)).sum(-1, keepdim=True)


def _threshold_of_unsorted_keys(
    key: Int[Tensor, "n V"], mass: Int64[Tensor, "n V"], target: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """`_threshold_of_sorted_keys` for keys in any order: radix select over 31 bits, in digits of 11, 11 and 9 bits."""
    prefix, mass_below = torch.zeros_like(target), torch.zeros_like(target)
    for high_bit, low_bit in ((31, 20), (20, 9), (9, 0)):
        num_buckets = 2 ** (high_bit - low_bit)
        in_prefix = mass if high_bit == 31 else mass * (key >> high_bit == prefix)
        bucket = ((key >> low_bit) & (num_buckets - 1)).long()
        histogram = target.new_zeros(len(key), num_buckets).scatter_add_(-1, bucket, in_prefix)
        cumulative = mass_below + histogram.cumsum(-1)
        digit = torch.searchsorted(cumulative, target).clamp(max=num_buckets - 1)
        mass_below = cumulative.gather(-1, digit) - histogram.gather(-1, digit)
        prefix = (prefix << (high_bit - low_bit)) | digit
    return prefix.to(key.dtype), mass_below


def inverse_cdf_sample(weight: Float[Tensor, "n V"], u: Float64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Sample one token per row with probability proportional to `weight`, from a uniform number u in [0, 1).

    The sampled token is the first at which the cumulative weight exceeds u · total. Its weight is never 0."""
    cdf = weight.cumsum(-1, dtype=torch.float64)
    index = torch.searchsorted(cdf, u.unsqueeze(-1) * cdf[:, -1:], right=True).clamp(max=weight.shape[-1] - 1)
    # A parallel cumulative sum may increase by a rounding error at a token of weight 0; use the argmax then.
    return torch.where(weight.gather(-1, index) > 0, index, weight.argmax(-1, keepdim=True)).squeeze(-1)


def logits_to_probs(
    logits: Float[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Float32[Tensor, "n V"]:
    """The distribution that `Sampler.sample` samples from. At temperature 0 it is one-hot at the most likely token."""
    max_logits, greedy = (x := apply_logits_processors(logits, state, features)).max(-1)
    one_hot = (torch.arange(x.shape[-1], device=x.device) == greedy.unsqueeze(-1)).float()
    if not features.sampled:
        return one_hot
    weight = unnormalized_probs(x, max_logits, state, features)
    probs = (weight / weight.sum(-1, keepdim=True, dtype=torch.float64)).float()
    return torch.where(state.is_sampled.unsqueeze(-1), probs, one_hot)
