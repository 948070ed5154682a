"""Triton kernels that draw a token from a wide row: the same filters and the same number as `distribution` has, in
three passes over the vocabulary instead of twenty."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int64
from torch import Tensor
from triton.language.extra import libdevice

from cutaway.generate.distribution import FARTHEST, FINEST, Needs, Rows, edge_of_top_p, last_of_top_k
from cutaway.generate.noise import BITS, FIRST, GOLDEN, SECOND

SIZE = 1024
"""Tokens of a part."""
GOLD, ONE, TWO = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)
KEPT_BITS, MASS = tl.constexpr(BITS), tl.constexpr(FINEST)


@triton.jit
def mixed(x):
    """`noise.mix`, of one number."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * ONE
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * TWO
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@triton.jit
def write_keys(x_ptr, best_ptr, temperature_ptr, key_ptr, V, SIZE: tl.constexpr):
    """How far each logit is below the best, in units of temperature, as bits that rise as chances fall."""
    row, part = tl.program_id(0), tl.program_id(1)
    v = part * SIZE + tl.arange(0, SIZE)
    temperature = tl.load(temperature_ptr + row)
    x = tl.load(x_ptr + row * V + v, mask=v < V, other=0.0).to(tl.float32) - tl.load(best_ptr + row).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    tl.store(key_ptr + row * V + v, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, mask=v < V)


@triton.jit
def weight_of(key):
    return libdevice.exp(-key.to(tl.float32, bitcast=True))


@triton.jit
def survey(key_ptr, edge_ptr, least_ptr, below_ptr, equal_ptr, mass_ptr, V, PARTS, SIZE: tl.constexpr):
    """Of a part: the weights of what is nearer than the edge, how many are at it, and the mass of both."""
    row, part = tl.program_id(0), tl.program_id(1)
    v = part * SIZE + tl.arange(0, SIZE)
    edge = tl.load(edge_ptr + row)
    key = tl.load(key_ptr + row * V + v, mask=v < V, other=0x7FFFFFFF)
    weight = tl.where(v < V, weight_of(key), 0.0)
    enough = weight >= tl.load(least_ptr + row)
    at = row * PARTS + part
    tl.store(below_ptr + at, tl.sum(tl.where((key < edge) & enough, weight, 0.0).to(tl.float64), 0))
    tl.store(equal_ptr + at, tl.sum(((key == edge) & (v < V)).to(tl.int32), 0))
    tl.store(mass_ptr + at, tl.sum(tl.where(key <= edge, (weight.to(tl.float64) * MASS).to(tl.int64), 0), 0))


@triton.jit
def pick(
    key_ptr, edge_ptr, wanted_ptr, least_ptr, below_ptr, equal_ptr, temperature_ptr, seed_ptr, step_ptr, best_ptr,
    token_ptr, V, PARTS, SEED_STRIDE, BP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One row: the part in which its number lies, then the token. `best` is for rows that do not draw."""
    row = tl.program_id(0)
    edge, wanted, least = tl.load(edge_ptr + row), tl.load(wanted_ptr + row), tl.load(least_ptr + row)
    p = tl.arange(0, BP)
    below = tl.load(below_ptr + row * PARTS + p, mask=p < PARTS, other=0.0)
    equal = tl.load(equal_ptr + row * PARTS + p, mask=p < PARTS, other=0).to(tl.int64)
    edge_weight = weight_of(edge)
    edge_weight = tl.where(edge_weight >= least, edge_weight, 0.0).to(tl.float64)
    earlier = tl.cumsum(equal, 0) - equal
    taken = tl.minimum(tl.maximum(wanted - earlier, 0), equal)
    upto = tl.cumsum(below + taken.to(tl.float64) * edge_weight, 0)
    x = mixed(tl.load(seed_ptr + row * SEED_STRIDE) + GOLD)
    x = mixed(mixed(x + tl.load(step_ptr + row) * GOLD) ^ 1)
    number = ((x >> (64 - KEPT_BITS)) & ((1 << KEPT_BITS) - 1)).to(tl.float64) / (1 << KEPT_BITS)
    target = number * tl.max(upto, 0)
    part = tl.minimum(tl.sum((upto <= target).to(tl.int32), 0), PARTS - 1)
    before = tl.sum(tl.where(p == part - 1, upto, 0.0), 0)
    ranked = tl.sum(tl.where(p == part, earlier, 0), 0)
    v = tl.arange(0, SIZE)
    inside = part * SIZE + v < V
    key = tl.load(key_ptr + row * V + part * SIZE + v, mask=inside, other=0x7FFFFFFF)
    at_edge = (key == edge) & inside
    rank = tl.cumsum(at_edge.to(tl.int64), 0) + ranked
    weight = weight_of(key)
    keep = inside & (weight >= least) & ((key < edge) | (at_edge & (rank <= wanted)))
    weight = tl.where(keep, weight, 0.0)
    within = before + tl.cumsum(weight.to(tl.float64), 0)
    spot = tl.sum((within <= target).to(tl.int32), 0)
    found = tl.sum(tl.where(v == spot, weight, 0.0), 0) > 0  # a sum's rounding may end where no token is
    drawn = (tl.load(temperature_ptr + row) > 0) & found
    token = tl.load(best_ptr + row)
    tl.store(token_ptr + row, tl.where(drawn, (part * SIZE + spot).to(tl.int64), token))


def draw_one_each(
    x: Float[Tensor, "n V"], best: Float[Tensor, " n"], choice: Int64[Tensor, " n"], rows: Rows, needs: Needs
) -> Int64[Tensor, " n"]:
    """A token for each row from `distribution.weights` of its logits; `choice` where the temperature is 0."""
    count, size = x.shape
    parts = triton.cdiv(size, SIZE)
    grid = (count, parts)
    temperature, least = rows.number(0).contiguous(), rows.number(2).contiguous()
    key = torch.empty(count, size, dtype=torch.int32, device=x.device)
    write_keys[grid](x.contiguous(), best, temperature, key, size, SIZE=SIZE)
    below = torch.empty(count, parts, dtype=torch.float64, device=x.device)
    mass = torch.empty(count, parts, dtype=torch.int64, device=x.device)
    equal = torch.empty(count, parts, dtype=torch.int32, device=x.device)

    def look(edge: Int[Tensor, "n 1"]) -> None:
        survey[grid](key, edge, least, below, equal, mass, size, parts, SIZE=SIZE)

    edge = torch.full_like(choice.unsqueeze(-1), FARTHEST, dtype=torch.int32)
    wanted = torch.full_like(choice.unsqueeze(-1), size)
    if needs.window:
        edge, near = last_of_top_k(key, rows, needs)
        if needs.top_p:
            look(edge)
            edge, wanted = edge_of_top_p(key, edge, near, mass.sum(-1, keepdim=True), rows)
    look(edge)
    token = torch.empty_like(choice)
    pick[(count,)](
        key, edge, wanted, least, below, equal, temperature, rows.whole, rows.step, choice, token, size, parts,
        rows.whole.stride(0), BP=triton.next_power_of_2(parts), SIZE=SIZE, num_warps=8,
    )  # fmt: skip
    return token
