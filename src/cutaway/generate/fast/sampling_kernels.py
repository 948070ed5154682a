"""Triton kernels that sample a token from logits with a large vocabulary.

Filters and random numbers are those of `logits_processing`, but with three passes over the vocabulary, not twenty.
A logit is represented by a sort key: the bits of (max logit − logit) / temperature. Bits of non-negative floats have
the order of their values, so a top-k or top-p filter is a threshold on integers: tokens with key < threshold are kept,
and so are the first `num_ties` of the tokens with key = threshold (ties).
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int64
from torch import Tensor
from triton.language.extra import libdevice

from cutaway.generate.sampling.logits_processing import MASS_SCALE, MAX_KEY, top_k_threshold, top_p_threshold
from cutaway.generate.sampling.rng import GOLDEN_GAMMA, MIX_MULTIPLIER_1, MIX_MULTIPLIER_2, UNIFORM_BITS
from cutaway.generate.sampling.sampling_state import SamplingFeatures, SamplingState

BLOCK_SIZE = 1024
"""Number of vocabulary entries per Triton program."""
KERNEL_GOLDEN_GAMMA = tl.constexpr(GOLDEN_GAMMA)
KERNEL_MIX_MULTIPLIER_1, KERNEL_MIX_MULTIPLIER_2 = tl.constexpr(MIX_MULTIPLIER_1), tl.constexpr(MIX_MULTIPLIER_2)
KERNEL_UNIFORM_BITS, KERNEL_MASS_SCALE = tl.constexpr(UNIFORM_BITS), tl.constexpr(MASS_SCALE)


@triton.jit
def _mix64(x):
    """Triton implementation of `rng.mix64` for a 64-bit integer."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * KERNEL_MIX_MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * KERNEL_MIX_MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def logit_keys_kernel(x_ptr, max_logit_ptr, temperature_ptr, key_ptr, V, BLOCK_SIZE: tl.constexpr):
    """Write the sort key of each logit, (max − logit) / temperature as bits. It is smaller for more likely tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    v = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    temperature = tl.load(temperature_ptr + row)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32) - tl.load(max_logit_ptr + row).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    tl.store(key_ptr + row * V + v, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, mask=v < V)


@triton.jit
def _weight_of_key(key):
    """Unnormalized probability exp(−(max − logit) / temperature) of a token with this sort key."""
    return libdevice.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def block_sums_kernel(
    key_ptr, threshold_ptr, min_p_ptr, below_sum_ptr, tie_count_ptr, mass_ptr, V, NUM_BLOCKS, BLOCK_SIZE: tl.constexpr
):
    """Write three sums per block of the vocabulary. A weight is an unnormalized probability.

    The first sum is over the weights with key < threshold that min-p keeps. The second is the number of ties
    (key = threshold). The third is over the weights with key ≤ threshold, in fixed point (see `MASS_SCALE`), so that it
    does not depend on the order of additions.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    v = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    threshold = tl.load(threshold_ptr + row)
    key = tl.load(key_ptr + row * V + v, mask=v < V, other=0x7FFFFFFF)
    weight = tl.where(v < V, _weight_of_key(key), 0.0)
    above_min_p = weight >= tl.load(min_p_ptr + row)
    index = row * NUM_BLOCKS + block
    tl.store(below_sum_ptr + index, tl.sum(tl.where((key < threshold) & above_min_p, weight, 0.0).to(tl.float64), 0))
    tl.store(tie_count_ptr + index, tl.sum(((key == threshold) & (v < V)).to(tl.int32), 0))
    mass = (weight.to(tl.float64) * KERNEL_MASS_SCALE).to(tl.int64)
    tl.store(mass_ptr + index, tl.sum(tl.where(key <= threshold, mass, 0), 0))


@triton.jit
def sample_token_kernel(
    key_ptr, threshold_ptr, num_ties_ptr, min_p_ptr, below_sum_ptr, tie_count_ptr, temperature_ptr, seed_ptr, step_ptr,
    greedy_ptr, token_ptr, V, NUM_BLOCKS, SEED_STRIDE, NUM_BLOCKS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Inverse-CDF sampling of one row: find the block that contains u · total, then the token within the block.

    Rows with temperature 0 take the greedy token.
    """
    row = tl.program_id(0)
    threshold, num_ties, min_p = tl.load(threshold_ptr + row), tl.load(num_ties_ptr + row), tl.load(min_p_ptr + row)
    block_ids = tl.arange(0, NUM_BLOCKS_POW2)
    below_sums = tl.load(below_sum_ptr + row * NUM_BLOCKS + block_ids, mask=block_ids < NUM_BLOCKS, other=0.0)
    tie_counts = tl.load(tie_count_ptr + row * NUM_BLOCKS + block_ids, mask=block_ids < NUM_BLOCKS, other=0)
    tie_counts = tie_counts.to(tl.int64)
    tie_weight = _weight_of_key(threshold)
    tie_weight = tl.where(tie_weight >= min_p, tie_weight, 0.0).to(tl.float64)
    ties_before = tl.cumsum(tie_counts, 0) - tie_counts
    ties_taken = tl.minimum(tl.maximum(num_ties - ties_before, 0), tie_counts)
    cumulative = tl.cumsum(below_sums + ties_taken.to(tl.float64) * tie_weight, 0)
    x = _mix64(tl.load(seed_ptr + row * SEED_STRIDE) + KERNEL_GOLDEN_GAMMA)
    x = _mix64(_mix64(x + tl.load(step_ptr + row) * KERNEL_GOLDEN_GAMMA) ^ 1)
    x = (x >> (64 - KERNEL_UNIFORM_BITS)) & ((1 << KERNEL_UNIFORM_BITS) - 1)
    u = x.to(tl.float64) / (1 << KERNEL_UNIFORM_BITS)
    target = u * tl.max(cumulative, 0)
    block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
    mass_before = tl.sum(tl.where(block_ids == block - 1, cumulative, 0.0), 0)
    rank_before = tl.sum(tl.where(block_ids == block, ties_before, 0), 0)
    v = tl.arange(0, BLOCK_SIZE)
    valid = block * BLOCK_SIZE + v < V
    key = tl.load(key_ptr + row * V + block * BLOCK_SIZE + v, mask=valid, other=0x7FFFFFFF)
    is_tie = (key == threshold) & valid
    rank = tl.cumsum(is_tie.to(tl.int64), 0) + rank_before
    weight = _weight_of_key(key)
    keep = valid & (weight >= min_p) & ((key < threshold) | (is_tie & (rank <= num_ties)))
    weight = tl.where(keep, weight, 0.0)
    block_cumulative = mass_before + tl.cumsum(weight.to(tl.float64), 0)
    position = tl.sum((block_cumulative <= target).to(tl.int32), 0)
    # If rounding of the sums selects a token of weight 0, the greedy token is used.
    is_sampled = tl.sum(tl.where(v == position, weight, 0.0), 0) > 0
    use_sampled = (tl.load(temperature_ptr + row) > 0) & is_sampled
    token = tl.load(greedy_ptr + row)
    tl.store(token_ptr + row, tl.where(use_sampled, (block * BLOCK_SIZE + position).to(tl.int64), token))


def triton_sample(
    logits: Float[Tensor, "n V"],
    max_logits: Float[Tensor, " n"],
    greedy_tokens: Int64[Tensor, " n"],
    state: SamplingState,
    features: SamplingFeatures,
) -> Int64[Tensor, " n"]:
    """Sample one token per row with probability proportional to `logits_processing.unnormalized_probs`.

    A row with temperature 0 gets its entry of `greedy_tokens`."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    grid = (num_rows, num_blocks)
    temperature, min_p = state.float_param(0).contiguous(), state.float_param(2).contiguous()
    keys = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
    logit_keys_kernel[grid](logits.contiguous(), max_logits, temperature, keys, vocab_size, BLOCK_SIZE=BLOCK_SIZE)
    below_sums = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    masses = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits.device)
    tie_counts = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)

    def compute_block_sums(threshold: Int[Tensor, "n 1"]) -> None:
        block_sums_kernel[grid](
            keys, threshold, min_p, below_sums, tie_counts, masses, vocab_size, num_blocks, BLOCK_SIZE=BLOCK_SIZE
        )

    threshold = torch.full_like(greedy_tokens.unsqueeze(-1), MAX_KEY, dtype=torch.int32)
    num_ties = torch.full_like(greedy_tokens.unsqueeze(-1), vocab_size)
    if features.top_k_window:
        threshold, candidates = top_k_threshold(keys, state, features)
        if features.top_p:
            compute_block_sums(threshold)
            threshold, num_ties = top_p_threshold(keys, threshold, candidates, masses.sum(-1, keepdim=True), state)
    compute_block_sums(threshold)
    token = torch.empty_like(greedy_tokens)
    sample_token_kernel[(num_rows,)](
        keys, threshold, num_ties, min_p, below_sums, tie_counts, temperature, state.int_params, state.output_len,
        greedy_tokens, token, vocab_size, num_blocks, state.int_params.stride(0),
        NUM_BLOCKS_POW2=triton.next_power_of_2(num_blocks), BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
    )  # fmt: skip
    return token
