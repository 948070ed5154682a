"""Packing in the k-quant formats Q4_K, Q5_K and Q6_K, with a search for the scales of the groups.

The scale that maps the extremes of a group to the extreme codes is not the best one. As in ggml, several scales are
tried for each group, each is replaced by that of least squares for its codes, and large weights count more in the
squared error. ggml then rounds the scales. Here, each is also tried one step up and down, and the fp16 scales of a
block become those of least squares, so that the error is lower than that of ggml. `block_formats.py` describes the
formats.

Weights are (32, 8, blocks), or (16, 16, blocks) for Q6_K, so that sums over a group are sums of long vectors.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

_CHUNK_NUMEL = 1 << 17
"""Number of weights that are packed at once, so that the tensors of the search stay in the cache."""
_NUM_CANDIDATES = 11
"""Number of scales that are tried for a group. ggml tries 21 (Q4_K) or 19; more than 11 have no effect here."""


def pack_k_quants(weight: Float[Tensor, "rows columns"], name: str) -> UInt8[Tensor, "rows bytes"]:
    """Pack a matrix in the format Q4_K, Q5_K or Q6_K."""
    blocks = weight.reshape(-1, 256)
    pack = {"Q4_K": _pack_q4_k, "Q5_K": _pack_q5_k, "Q6_K": _pack_q6_k}[name]
    parts = [torch.cat(pack(chunk.float().T), 0).T for chunk in torch.split(blocks, _CHUNK_NUMEL // 256)]
    return torch.cat(parts).view(len(weight), -1)


def divide(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0, x / torch.where(scale == 0, 1, scale))


def _pack_q4_k(weights: Tensor) -> list[Tensor]:
    codes, header = _search_offset_codes(weights, 15)
    return [*header, _join_nibbles(codes)]


def _pack_q5_k(weights: Tensor) -> list[Tensor]:
    codes, header = _search_offset_codes(weights, 31)
    groups = torch.arange(8, dtype=torch.uint8).view(8, 1, 1)
    high = (codes >> 4 << groups).sum(0, dtype=torch.uint8)  # bit g of 32 bytes: group g
    return [*header, high, _join_nibbles(codes & 15)]


def _join_nibbles(codes: Tensor) -> Tensor:
    return (codes[0::2] | codes[1::2] << 4).flatten(0, 1)


def _search_offset_codes(weights: Tensor, max_code: int) -> tuple[Tensor, list[Tensor]]:
    """Codes (8, 32, blocks) with weight ≈ d · s · code − d_min · m, and the bytes of d, d_min, s and m.

    d and d_min are fp16 numbers of a block, s and m integers of 6 bits of its 8 groups."""
    x = weights.view(8, 32, -1).transpose(0, 1).contiguous()
    importance = x.square().mean(0).sqrt() + x.abs()
    scales, minima = _search_scales_and_minima(x, importance, max_code)
    d, d_min = ((each.amax(0) / 63).half().float() for each in (scales, minima))
    s, m = (divide(each, unit).round().clamp(0, 63) for each, unit in ((scales, d), (minima, d_min)))

    def quantize(d: Tensor, d_min: Tensor, s: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and the error of each group."""
        scale, offset = d * s, d_min * m
        shifted = x + offset
        codes = (shifted * divide(torch.ones(()), scale)).round_().clamp_(0, max_code)
        return codes, ((codes * scale).sub_(shifted).square_() * importance).sum(0)

    first_s, first_m = s, m
    _, error = quantize(d, d_min, s, m)
    for step_s, step_m in ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j):
        new_s, new_m = (first_s + step_s).clamp(0, 63), (first_m + step_m).clamp(0, 63)
        _, new_error = quantize(d, d_min, new_s, new_m)
        s, m = torch.where(new_error < error, new_s, s), torch.where(new_error < error, new_m, m)
        error = torch.minimum(error, new_error)
    codes, error = quantize(d, d_min, s, m)
    # Least squares of d · a − d_min · m for a = s · code.
    weighted = importance * codes
    w, wx, wq = importance.sum(0), (importance * x).sum(0), weighted.sum(0)
    wqx, wqq = (weighted * x).sum(0), weighted.mul_(codes).sum(0)
    aa, ab, bb, ax, bx = (each.sum(0) for each in (s * s * wqq, s * m * wq, m * m * w, s * wqx, m * wx))
    determinant = aa * bb - ab * ab
    has_both = determinant > 1e-6 * aa * bb
    new_d = torch.where(has_both, divide(ax * bb - bx * ab, determinant), divide(ax, aa)).half().float()
    new_d_min = torch.where(has_both, divide(ax * ab - bx * aa, determinant), d_min).half().float()
    new_codes, new_error = quantize(new_d, new_d_min, s, m)
    better = (new_error.sum(0) < error.sum(0)) & (new_d >= 0) & (new_d_min >= 0)
    d, d_min = torch.where(better, new_d, d), torch.where(better, new_d_min, d_min)
    codes = torch.where(better, new_codes, codes).to(torch.uint8).transpose(0, 1)
    s, m = s.to(torch.uint8), m.to(torch.uint8)
    packed = [s[:4] | s[4:] >> 4 << 6, m[:4] | m[4:] >> 4 << 6, s[4:] & 15 | (m[4:] & 15) << 4]
    return codes, [_half_bytes(d), _half_bytes(d_min), *packed]


def _search_scales_and_minima(x: Tensor, importance: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Scales and minima ≥ 0 of groups, (8, blocks), with the smallest error of scale · code − minimum."""
    low = x.amin(0).clamp_(max=0)
    width = x.amax(0).clamp_(min=0) - low
    scales, minima, gain = width / max_code, -low, torch.full_like(low, -torch.inf)
    shifted, weighted_x = x - low, importance * x
    w, wx = importance.sum(0), weighted_x.sum(0)
    for extra in torch.linspace(-1, 1, _NUM_CANDIDATES).tolist():
        codes = (shifted * divide(torch.tensor(max_code + extra), width)).round_().clamp_(0, max_code)
        weighted = importance * codes
        wq, wqx, wqq = weighted.sum(0), (weighted_x * codes).sum(0), weighted.mul_(codes).sum(0)
        determinant = w * wqq - wq * wq
        scale, minimum = divide(w * wqx - wx * wq, determinant), divide(wq * wqx - wqq * wx, determinant)
        scale, minimum = torch.where(minimum < 0, divide(wqx, wqq), scale), minimum.clamp_(min=0)
        new_gain = scale * wqx - minimum * wx  # Σ importance · x² minus the error
        better = (new_gain > gain) & (determinant > 0) & (scale > 0)
        scales, minima = torch.where(better, scale, scales), torch.where(better, minimum, minima)
        gain = torch.where(better, new_gain, gain)
    return scales, minima


def _pack_q6_k(weights: Tensor) -> list[Tensor]:
    """weight ≈ d · s · code, with codes from −32 to 31, and an integer s of 8 bits for each of 16 groups of 16."""
    x = weights.view(16, 16, -1).transpose(0, 1).contiguous()
    importance = x.square()
    weighted_x = importance * x
    low, high = x.amin(0), x.amax(0)
    extreme = torch.where(-low > high, low, high)
    scales, gain = extreme / -32, torch.full_like(extreme, -torch.inf)
    for extra in torch.linspace(-0.9, 0.9, _NUM_CANDIDATES).tolist():
        codes = (x * divide(torch.tensor(-32 - extra), extreme)).round_().clamp_(-32, 31)
        wqx, wqq = (codes * weighted_x).sum(0), codes.square_().mul_(importance).sum(0)
        scale = divide(wqx, wqq)
        better = scale * wqx > gain
        scales, gain = torch.where(better, scale, scales), torch.where(better, scale * wqx, gain)
    low, high = scales.amin(0), scales.amax(0)
    d = (torch.where(-low > high, low, high) / -128).half().float()
    s = divide(scales, d).round().clamp(-128, 127)

    def quantize(d: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        scale = d * s
        codes = (x * divide(torch.ones(()), scale)).round_().clamp_(-32, 31)
        return codes, ((codes * scale).sub_(x).square_() * importance).sum(0)

    first_s = s
    _, error = quantize(d, s)
    for step in (-1, 1):
        new_s = (first_s + step).clamp(-128, 127)
        _, new_error = quantize(d, new_s)
        s, error = torch.where(new_error < error, new_s, s), torch.minimum(error, new_error)
    codes, error = quantize(d, s)
    wqx, wqq = (codes * weighted_x).sum(0), (codes.square() * importance).sum(0)
    new_d = divide((s * wqx).sum(0), (s * s * wqq).sum(0)).half().float()
    new_codes, new_error = quantize(new_d, s)
    better = new_error.sum(0) < error.sum(0)
    d, codes = torch.where(better, new_d, d), torch.where(better, new_codes, codes)
    # Two halves of four quarters of 32 weights.
    q = (codes + 32).to(torch.uint8).transpose(0, 1).reshape(2, 4, 32, -1)
    low_bits = (q[:, :2] & 15 | (q[:, 2:] & 15) << 4).flatten(0, 2)
    high_bits = (q[:, 0] >> 4 | q[:, 1] >> 4 << 2 | q[:, 2] >> 4 << 4 | q[:, 3] >> 4 << 6).flatten(0, 1)
    return [low_bits, high_bits, s.to(torch.int8).view(torch.uint8), _half_bytes(d)]


def _half_bytes(x: Tensor) -> Tensor:
    """Bytes of numbers in fp16: (2, …)."""
    return x.half().unsqueeze(-1).view(torch.uint8).movedim(-1, 0)
