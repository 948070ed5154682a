"""Triton kernels that draw a token from a wide row: the same filters and the same number as `logits_processing` has, in
three passes over the vocabulary instead of twenty."""

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
"""Tokens of a part."""
KERNEL_GOLDEN_GAMMA, KERNEL_MIX_MULTIPLIER_1, KERNEL_MIX_MULTIPLIER_2 = (
    tl.constexpr(GOLDEN_GAMMA),
    tl.constexpr(MIX_MULTIPLIER_1),
    tl.constexpr(MIX_MULTIPLIER_2),
)
KERNEL_UNIFORM_BITS, KERNEL_MASS_SCALE = tl.constexpr(UNIFORM_BITS), tl.constexpr(MASS_SCALE)


@triton.jit
def _mix64(x):
    """`rng.mix64`, of one number."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * KERNEL_MIX_MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * KERNEL_MIX_MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def logit_keys_kernel(x_ptr, max_logit_ptr, temperature_ptr, key_ptr, V, BLOCK_SIZE: tl.constexpr):
    """How far each logit is below the best, in units of temperature, as bits that rise as chances fall."""
    row, part = tl.program_id(0), tl.program_id(1)
    v = part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    temperature = tl.load(temperature_ptr + row)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32) - tl.load(max_logit_ptr + row).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    tl.store(key_ptr + row * V + v, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, mask=v < V)


@triton.jit
def _weight_of_key(key):
    return libdevice.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def block_sums_kernel(
    key_ptr, threshold_ptr, min_p_ptr, below_sum_ptr, tie_count_ptr, mass_ptr, V, NUM_BLOCKS, BLOCK_SIZE: tl.constexpr
):
    """Of a part: the weights of what is nearer than the edge, how many are at it, and the mass of both."""
    row, part = tl.program_id(0), tl.program_id(1)
    v = part * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    edge = tl.load(threshold_ptr + row)
    key = tl.load(key_ptr + row * V + v, mask=v < V, other=0x7FFFFFFF)
    weight = tl.where(v < V, _weight_of_key(key), 0.0)
    enough = weight >= tl.load(min_p_ptr + row)
    at = row * NUM_BLOCKS + part
    tl.store(below_sum_ptr + at, tl.sum(tl.where((key < edge) & enough, weight, 0.0).to(tl.float64), 0))
    tl.store(tie_count_ptr + at, tl.sum(((key == edge) & (v < V)).to(tl.int32), 0))
    tl.store(
        mass_ptr + at, tl.sum(tl.where(key <= edge, (weight.to(tl.float64) * KERNEL_MASS_SCALE).to(tl.int64), 0), 0)
    )


@triton.jit
def sample_token_kernel(
    key_ptr, threshold_ptr, num_ties_ptr, min_p_ptr, below_sum_ptr, tie_count_ptr, temperature_ptr, seed_ptr, step_ptr,
    greedy_ptr, token_ptr, V, NUM_BLOCKS, SEED_STRIDE, NUM_BLOCKS_POW2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row: the part in which its number lies, then the token. `greedy` is for rows that do not draw."""
    row = tl.program_id(0)
    edge, wanted, least = tl.load(threshold_ptr + row), tl.load(num_ties_ptr + row), tl.load(min_p_ptr + row)
    p = tl.arange(0, NUM_BLOCKS_POW2)
    below = tl.load(below_sum_ptr + row * NUM_BLOCKS + p, mask=p < NUM_BLOCKS, other=0.0)
    equal = tl.load(tie_count_ptr + row * NUM_BLOCKS + p, mask=p < NUM_BLOCKS, other=0).to(tl.int64)
    edge_weight = _weight_of_key(edge)
    edge_weight = tl.where(edge_weight >= least, edge_weight, 0.0).to(tl.float64)
    earlier = tl.cumsum(equal, 0) - equal
    taken = tl.minimum(tl.maximum(wanted - earlier, 0), equal)
    upto = tl.cumsum(below + taken.to(tl.float64) * edge_weight, 0)
    x = _mix64(tl.load(seed_ptr + row * SEED_STRIDE) + KERNEL_GOLDEN_GAMMA)
    x = _mix64(_mix64(x + tl.load(step_ptr + row) * KERNEL_GOLDEN_GAMMA) ^ 1)
    number = ((x >> (64 - KERNEL_UNIFORM_BITS)) & ((1 << KERNEL_UNIFORM_BITS) - 1)).to(tl.float64) / (
        1 << KERNEL_UNIFORM_BITS
    )
    target = number * tl.max(upto, 0)
    part = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), NUM_BLOCKS - 1)
    before = tl.sum(tl.where(p == part - 1, upto, 0.0), 0)
    ranked = tl.sum(tl.where(p == part, earlier, 0), 0)
    v = tl.arange(0, BLOCK_SIZE)
    inside = part * BLOCK_SIZE + v < V
    key = tl.load(key_ptr + row * V + part * BLOCK_SIZE + v, mask=inside, other=0x7FFFFFFF)
    at_edge = (key == edge) & inside
    rank = tl.cumsum(at_edge.to(tl.int64), 0) + ranked
    weight = _weight_of_key(key)
    keep = inside & (weight >= least) & ((key < edge) | (at_edge & (rank <= wanted)))
    weight = tl.where(keep, weight, 0.0)
    within = before + tl.cumsum(weight.to(tl.float64), 0)
    spot = tl.sum((within <= target).to(tl.int32), 0)
    found = tl.sum(tl.where(v == spot, weight, 0.0), 0) > 0  # a sum's rounding may end where no token is
    drawn = (tl.load(temperature_ptr + row) > 0) & found
    token = tl.load(greedy_ptr + row)
    tl.store(token_ptr + row, tl.where(drawn, (part * BLOCK_SIZE + spot).to(tl.int64), token))


def triton_sample(
    logits: Float[Tensor, "n V"],
    max_logits: Float[Tensor, " n"],
    greedy_tokens: Int64[Tensor, " n"],
    state: SamplingState,
    features: SamplingFeatures,
) -> Int64[Tensor, " n"]:
    """A token for each row from the `unnormalized_probs` of its logits; `greedy_tokens` where the temperature is 0."""
    count, size = logits.shape
    parts = triton.cdiv(size, BLOCK_SIZE)
    grid = (count, parts)
    temperature, least = state.float_param(0).contiguous(), state.float_param(2).contiguous()
    key = torch.empty(count, size, dtype=torch.int32, device=logits.device)
    logit_keys_kernel[grid](logits.contiguous(), max_logits, temperature, key, size, BLOCK_SIZE=BLOCK_SIZE)
    below = torch.empty(count, parts, dtype=torch.float64, device=logits.device)
    mass = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    equal = torch.empty(count, parts, dtype=torch.int32, device=logits.device)

    def look(edge: Int[Tensor, "n 1"]) -> None:
        block_sums_kernel[grid](key, edge, least, below, equal, mass, size, parts, BLOCK_SIZE=BLOCK_SIZE)

    edge = torch.full_like(greedy_tokens.unsqueeze(-1), MAX_KEY, dtype=torch.int32)
    wanted = torch.full_like(greedy_tokens.unsqueeze(-1), size)
    if features.top_k_window:
        edge, near = top_k_threshold(key, state, features)
        if features.top_p:
            look(edge)
            edge, wanted = top_p_threshold(key, edge, near, mass.sum(-1, keepdim=True), state)
    look(edge)
    token = torch.empty_like(greedy_tokens)
    sample_token_kernel[(count,)](
        key, edge, wanted, least, below, equal, temperature, state.int_params, state.output_len, greedy_tokens, token,
        size, parts, state.int_params.stride(0), NUM_BLOCKS_POW2=triton.next_power_of_2(parts), BLOCK_SIZE=BLOCK_SIZE,
        num_warps=8,
    )  # fmt: skip
    return token
