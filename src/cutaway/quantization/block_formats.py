"""Block formats of weight matrices: those of GGUF, and those for the matrices of GPTQ, AWQ, NF4 and fp8 checkpoints.

A row of a matrix is a sequence of blocks. The weights of a group of a block are scale · value(code) + offset, where the
value of a code is the code itself, or for NF4, FP4 and FP8 the number that it stands for.

| format    | block | bytes | groups of | code                              | scale and offset                   |
|-----------|-------|-------|-----------|-----------------------------------|------------------------------------|
| Q4_0      | 32    | 18    | 32        | 4 bits, minus 8                   | fp16                               |
| Q4_1      | 32    | 20    | 32        | 4 bits                            | fp16 both                          |
| Q5_0      | 32    | 22    | 32        | 5 bits, minus 16                  | fp16                               |
| Q5_1      | 32    | 24    | 32        | 5 bits                            | fp16 both                          |
| Q8_0      | 32    | 34    | 32        | 8 bits, signed                    | fp16                               |
| Q4_K      | 256   | 144   | 32        | 4 bits                            | 6 bits each, times fp16 per block  |
| Q5_K      | 256   | 176   | 32        | 5 bits                            | 6 bits each, times fp16 per block  |
| Q6_K      | 256   | 210   | 16        | 6 bits, minus 32                  | 8 bits, times fp16 per block       |
| MXFP4     | 32    | 17    | 32        | 4 bits, FP4 E2M1                  | power of 2 (E8M0)                  |
| INT4_G128 | 128   | 68    | 128       | 4 bits                            | fp16 both (GPTQ and AWQ)           |
| NF4       | 64    | 34    | 64        | 4 bits, quantile of N(0, 1)       | fp16 (bitsandbytes)                |
| FP8_G128  | 128   | 132   | 128       | 8 bits, E4M3                      | fp32                               |
| INT8_G32  | 32    | 36    | 32        | 8 bits, minus 128                 | fp16 both (GPTQ with zero points)  |

Codes of 4 bits, two per byte: in blocks of 32, the first 16 codes are in the low halves of 16 bytes, the others in the
high halves; in larger blocks, 32 bytes hold two groups of 32 in the same way.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from cutaway.quantization.format_table import BLOCK_FORMATS, BlockFormat
from cutaway.quantization.k_quants import divide, pack_k_quants

__all__ = [
    "BLOCK_FORMATS",
    "FP4_VALUES",
    "NF4_VALUES",
    "BlockFormat",
    "UnpackedWeights",
    "pack_codes",
    "pack_weights",
    "unpack_blocks",
]

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of NF4: quantiles of N(0, 1), scaled to [−1, 1], with an exact 0. QLoRA (2023), appendix E."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of FP4 E2M1 (1 sign, 2 exponent, 1 mantissa bit) by their code."""


@dataclass(frozen=True)
class UnpackedWeights:
    """Codes of weights, and the scale and offset of each group: weight = scale · value(code) + offset."""

    codes: Tensor
    """(…, columns): integers."""

    scales: Float[Tensor, "*rows groups"]
    offsets: Float[Tensor, "*rows groups"] | None = None
    values: Float[Tensor, " codes"] | None = None
    """The value of each code; None if it is the code itself."""

    @property
    def group_size(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]

    def dequantize(self) -> Float[Tensor, "*rows columns"]:
        values = self.codes.float() if self.values is None else self.values[self.codes.int()]
        groups = torch.unflatten(values, -1, (-1, self.group_size)) * self.scales.unsqueeze(-1)
        return (groups if self.offsets is None else groups + self.offsets.unsqueeze(-1)).flatten(-2)


def unpack_blocks(blocks: UInt8[Tensor, "*rows bytes"], format: BlockFormat) -> UnpackedWeights:
    """Unpack rows of blocks, on any device. This is the definition of the formats; the kernels equal it."""
    parts = torch.unflatten(blocks, -1, (-1, format.num_bytes))
    codes, scales, offsets = _UNPACK[format.name](parts)
    flat_offsets = None if offsets is None else offsets.flatten(-2)
    return UnpackedWeights(codes.flatten(-2), scales.flatten(-2), flat_offsets, _values(format, blocks.device))


def _values(format: BlockFormat, device: torch.device) -> Tensor | None:
    if format.name == "FP8_G128":
        return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    table = {"MXFP4": FP4_VALUES, "NF4": NF4_VALUES}.get(format.name)
    return None if table is None else torch.tensor(table, device=device)


_Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""Codes (…, blocks, block size), scales and offsets (…, blocks, groups of a block)."""


def _half(parts: Tensor, first: int, count: int = 1) -> Tensor:
    """Numbers of 16 bits from byte `first` on, in fp32."""
    return parts[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, size: int) -> Tensor:
    """Integers of 4 bits: of each `size` bytes, first the low halves, then the high ones."""
    groups = torch.unflatten(data, -1, (-1, size))
    return torch.stack((groups & 15, groups >> 4), -2).flatten(-3)


def _bits(data: Tensor) -> Tensor:
    """The bits of bytes, from the lowest to the highest."""
    return (data.unsqueeze(-1) >> torch.arange(8, device=data.device, dtype=torch.uint8) & 1).flatten(-2)


def _unpack_q4_0(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 2:], 16).to(torch.int8) - 8, _half(p, 0), None


def _unpack_q4_1(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 4:], 16), _half(p, 0), _half(p, 2)


def _unpack_q5_0(p: Tensor) -> _Unpacked:
    codes = _nibbles(p[..., 6:], 16) | _bits(p[..., 2:6]) << 4
    return codes.to(torch.int8) - 16, _half(p, 0), None


def _unpack_q5_1(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 8:], 16) | _bits(p[..., 4:8]) << 4, _half(p, 0), _half(p, 2)


def _unpack_q8_0(p: Tensor) -> _Unpacked:
    return p[..., 2:].view(torch.int8), _half(p, 0), None


def _unpack_k_scales(p: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K. See `read_scales_q4_k` in linear.c."""
    a, b, c = p[..., 4:8], p[..., 8:12], p[..., 12:16]
    scales = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    minima = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    return _half(p, 0) * scales, -_half(p, 2) * minima


def _unpack_q4_k(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 16:], 32), *_unpack_k_scales(p)


def _unpack_q5_k(p: Tensor) -> _Unpacked:
    fifth = torch.unflatten(_bits(p[..., 16:48]), -1, (32, 8)).mT.flatten(-2)  # bit g of 32 bytes: group g
    return _nibbles(p[..., 48:], 32) | fifth << 4, *_unpack_k_scales(p)


def _unpack_q6_k(p: Tensor) -> _Unpacked:
    low = _nibbles(p[..., :128], 64)  # of each half: quarters 0 and 1 in the low bits, 2 and 3 in the high ones
    shifts = torch.tensor([[0], [2], [4], [6]], device=p.device, dtype=torch.uint8)
    high = torch.unflatten(p[..., 128:192], -1, (2, 1, 32)) >> shifts & 3
    return (low | high.flatten(-3) << 4).to(torch.int8) - 32, _half(p, 208) * p[..., 192:208].view(torch.int8), None


def _unpack_mxfp4(p: Tensor) -> _Unpacked:
    scales = torch.exp2(p[..., :1].float() - 127)
    return _nibbles(p[..., 1:], 16), scales, None


def _unpack_int4_g128(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 4:], 32), _half(p, 0), _half(p, 2)


def _unpack_nf4(p: Tensor) -> _Unpacked:
    return _nibbles(p[..., 2:], 32), _half(p, 0), None


def _unpack_fp8_g128(p: Tensor) -> _Unpacked:
    scales = p[..., :4].contiguous().view(torch.float32)
    return p[..., 4:], scales, None


def _unpack_int8_g32(p: Tensor) -> _Unpacked:
    return (p[..., 4:] ^ 0x80).view(torch.int8), _half(p, 0), _half(p, 2)


_UNPACK = {
    "Q4_0": _unpack_q4_0, "Q4_1": _unpack_q4_1, "Q5_0": _unpack_q5_0, "Q5_1": _unpack_q5_1, "Q8_0": _unpack_q8_0,
    "Q4_K": _unpack_q4_k, "Q5_K": _unpack_q5_k, "Q6_K": _unpack_q6_k, "MXFP4": _unpack_mxfp4,
    "INT4_G128": _unpack_int4_g128, "NF4": _unpack_nf4, "FP8_G128": _unpack_fp8_g128,
    "INT8_G32": _unpack_int8_g32,
}  # fmt: skip


def pack_weights(weight: Float[Tensor, "rows columns"], format: BlockFormat) -> UInt8[Tensor, "rows bytes"]:
    """Pack a matrix in the format Q8_0 or Q4_1, with rounding to nearest, or in Q4_K, Q5_K or Q6_K."""
    if format.block_size == 256:
        return pack_k_quants(weight, format.name)
    groups = torch.unflatten(weight.float(), -1, (-1, 32))
    parts = {"Q8_0": _pack_q8_0, "Q4_1": _pack_q4_1}[format.name](groups)
    return torch.cat(parts, -1).flatten(1)


def pack_codes(
    codes: UInt8[Tensor, "rows columns"],
    scales: Float[Tensor, "rows groups"],
    offsets: Float[Tensor, "rows groups"] | None,
    format: BlockFormat,
) -> UInt8[Tensor, "rows bytes"]:
    """Pack codes as they are in the format Q4_1, Q8_0, MXFP4, INT4_G128, INT8_G32, NF4 or FP8_G128.

    The scales (and offsets, in Q4_1, INT4_G128 and INT8_G32) are those of groups of columns, which may be longer than a
    block; each block stores them. The codes of Q8_0 and FP8_G128 are bytes of int8 and fp8 numbers. The scales of MXFP4
    are exponents plus 127."""
    num_blocks = codes.shape[-1] // format.block_size
    blocks = torch.unflatten(codes, -1, (num_blocks, format.block_size))

    def per_block(x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.repeat_interleave(num_blocks // x.shape[-1], -1).unsqueeze(-1)
        return x.to(dtype).view(torch.uint8)

    dtype = {"FP8_G128": torch.float32, "MXFP4": torch.uint8}.get(format.name, torch.float16)
    header = [per_block(scales, dtype)]
    if offsets is not None:
        header.append(per_block(offsets, dtype))
    if format.name in ("Q8_0", "FP8_G128", "INT8_G32"):
        data = blocks.view(torch.uint8)
    else:
        low, high = torch.unflatten(blocks, -1, (-1, 2, 16 if format.block_size == 32 else 32)).unbind(-2)
        data = (low | high << 4).flatten(-2)
    return torch.cat((*header, data), -1).flatten(-2).contiguous()


def _round(x: Tensor, low: int, high: int) -> Tensor:
    return x.round().clamp(low, high).to(torch.int16)


def _pack_q8_0(groups: Tensor) -> list[Tensor]:
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    return [scale.view(torch.uint8), _round(divide(groups, scale.float()), -127, 127).to(torch.int8).view(torch.uint8)]


def _pack_q4_1(groups: Tensor) -> list[Tensor]:
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale, minimum = ((high - low) / 15).half(), low.half()
    q = _round(divide(groups - minimum.float(), scale.float()), 0, 15).to(torch.uint8)
    return [scale.view(torch.uint8), minimum.view(torch.uint8), q[..., :16] | q[..., 16:] << 4]
