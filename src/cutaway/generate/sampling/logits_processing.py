"""The chances of the next token: from logits and what each row asks for to a distribution, and a draw from it.

What the rows need between them is known on the host (`SamplingFeatures`); nothing here asks a tensor for its value, so
a step can be captured in a CUDA graph or compiled whole. Order, as transformers' processors: repetition, presence and
frequency, bias and bans, the least length, temperature, top-k, top-p, min-p.
"""

import math

import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64
from torch import Tensor

from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState

MAX_KEY = 2**31 - 1


MASS_SCALE = 2.0**42
"""Parts of the largest chance in which top-p counts: a million tokens' fit an int64."""


def apply_logits_processors(
    logits: Float[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Float[Tensor, "n V"]:
    """The logits after all that depends on the tokens so far. NaN stays NaN: nothing is overwritten, only added to."""
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
        early = (state.output_len < state.int_params[:, 2]).unsqueeze(-1)
        x = x + torch.zeros_like(x).masked_fill(state.stop_token_mask & early, -math.inf)
    return x


def unnormalized_probs(
    x: Float[Tensor, "n V"], max_logits: Float[Tensor, " n"], state: SamplingState, features: SamplingFeatures
) -> Float32[Tensor, "n V"]:
    """What each token's chance is proportional to: exp((x − max) / temperature), 0 for what the filters leave out."""
    temperature = state.float_param(0)
    x = (x.float() - max_logits.float().unsqueeze(-1)) / torch.where(temperature > 0, temperature, 1)
    weight = x.exp()
    keep = _top_k_top_p_mask(x, weight, state, features) if features.top_k_window else None
    if features.min_p:  # the most likely token weighs 1
        enough = weight >= state.float_param(2)
        keep = enough if keep is None else keep & enough
    return weight if keep is None else torch.where(keep, weight, 0)


def _top_k_top_p_mask(
    x: Float32[Tensor, "n V"], weight: Float32[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Bool[Tensor, "n V"]:
    """What top-k leaves, with all that equal its last; of that what top-p leaves, of equals those with smaller ids.

    Only values are compared, never the order of equals, and masses are whole numbers, which add up to the same in any
    order: the answer depends on neither the batch nor the device.
    """
    key = x.view(torch.int32) & MAX_KEY  # no x is above 0, so the bits of |x| rise as x falls
    last, near = top_k_threshold(key, state, features)
    if not features.top_p:
        return key <= last
    total = (_fixed_point_mass(weight) * (key <= last)).sum(-1, keepdim=True)
    edge, wanted = top_p_threshold(key, last, near, total, state)
    equal = key == edge
    return (key < edge) | (equal & (equal.cumsum(-1) <= wanted))


def top_k_threshold(
    key: Int[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> tuple[Int[Tensor, "n 1"], Int[Tensor, "n k"] | None]:
    """The farthest key that top-k leaves, and the nearest keys in order if they are few."""
    top_k = state.int_params[:, 1:2].contiguous()
    if features.top_k_window < key.shape[-1]:
        near = key.topk(features.top_k_window, largest=False).values
        last = near.gather(-1, top_k.clamp(max=features.top_k_window) - 1).masked_fill(
            top_k > features.top_k_window, MAX_KEY
        )
        return last, near
    if features.top_k:
        return _crossing_key_radix(key, torch.ones_like(key, dtype=torch.int64), top_k)[0], None
    return torch.full_like(key[:, :1], MAX_KEY), None


def top_p_threshold(
    key: Int[Tensor, "n V"],
    top_k_key: Int[Tensor, "n 1"],
    nearest_keys: Int[Tensor, "n k"] | None,
    total_mass: Int64[Tensor, "n 1"],
    state: SamplingState,
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The farthest key that top-p leaves of those up to `top_k_key`, with `total_mass`; and how many that equal it."""
    top_p = state.float_params[:, 1:2]
    enough = (top_p * total_mass).ceil().long()
    if nearest_keys is not None:
        edge, before = _crossing_key_sorted(
            nearest_keys, _mass_of_key(nearest_keys) * (nearest_keys <= top_k_key), enough
        )
    else:
        edge, before = _crossing_key_radix(key, _mass_of_key(key) * (key <= top_k_key), enough)
    each = _mass_of_key(edge).clamp(min=1)
    wanted = (enough - before + each - 1) // each
    return torch.where(top_p < 1, edge, top_k_key), torch.where(top_p < 1, wanted, key.shape[-1])


def _mass_of_key(key: Int[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """What a token with this key weighs, as a whole number."""
    return _fixed_point_mass((-key.view(torch.float32)).exp())


def _fixed_point_mass(weight: Float32[Tensor, "n k"]) -> Int64[Tensor, "n k"]:
    """A chance, of which the largest is 1, as a whole number."""
    return (weight.double() * MASS_SCALE).long()


def _crossing_key_sorted(
    key: Int[Tensor, "n k"], amount: Int64[Tensor, "n k"], target: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The key at which the amounts, added up in the order of keys, reach `target`; and the amount of smaller keys."""
    spot = torch.searchsorted(amount.cumsum(-1), target).clamp(max=key.shape[-1] - 1)
    edge = key.gather(-1, spot)
    return edge, (amount * (key < edge)).sum(-1, keepdim=True)


def _crossing_key_radix(
    key: Int[Tensor, "n V"], amount: Int64[Tensor, "n V"], target: Int64[Tensor, "n 1"]
) -> tuple[Int[Tensor, "n 1"], Int64[Tensor, "n 1"]]:
    """The same for keys in any order: their 31 bits are found digit by digit, which spares a sort."""
    edge, before = torch.zeros_like(target), torch.zeros_like(target)
    for above, below in ((31, 20), (20, 9), (9, 0)):
        size = 2 ** (above - below)
        here = amount if above == 31 else amount * (key >> above == edge)
        held = target.new_zeros(len(key), size).scatter_add_(-1, ((key >> below) & (size - 1)).long(), here)
        upto = before + held.cumsum(-1)
        digit = torch.searchsorted(upto, target).clamp(max=size - 1)
        before = upto.gather(-1, digit) - held.gather(-1, digit)
        edge = (edge << (above - below)) | digit
    return edge.to(key.dtype), before


def inverse_cdf_sample(weight: Float[Tensor, "n V"], u: Float64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The token at `u` (0 to 1) of the cumulative weights; never one of weight 0."""
    upto = weight.cumsum(-1, dtype=torch.float64)
    spot = torch.searchsorted(upto, u.unsqueeze(-1) * upto[:, -1:], right=True).clamp(max=weight.shape[-1] - 1)
    # A sum in parallel may step by a rounding error where nothing was added: such a spot is no token's.
    return torch.where(weight.gather(-1, spot) > 0, spot, weight.argmax(-1, keepdim=True)).squeeze(-1)


def logits_to_probs(
    logits: Float[Tensor, "n V"], state: SamplingState, features: SamplingFeatures
) -> Float32[Tensor, "n V"]:
    """The distribution that `Sampler.sample` draws from; all on the most likely token where the temperature is 0."""
    best, choice = (x := apply_logits_processors(logits, state, features)).max(-1)
    certain = (torch.arange(x.shape[-1], device=x.device) == choice.unsqueeze(-1)).float()
    if not features.sampled:
        return certain
    weight = unnormalized_probs(x, best, state, features)
    share = (weight / weight.sum(-1, keepdim=True, dtype=torch.float64)).float()
    return torch.where(state.is_sampled.unsqueeze(-1), share, certain)
