"""Block formats: unpacked weights equal those of the gguf package, and packing is the inverse of unpacking."""

import gguf
import numpy as np
import pytest
import torch

from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.quantization.block_formats import BLOCK_FORMATS, pack_codes, unpack_blocks
from cutaway.quantization.quantized_tensor import dequantize_rows

GGUF_FORMATS = [name for name in BLOCK_FORMATS if hasattr(gguf.GGMLQuantizationType, name)]


def random_blocks(name: str, rows: int = 5, num_blocks: int = 3) -> torch.Tensor:
    """Random bytes, with scales that are neither infinite nor NaN."""
    block_format = BLOCK_FORMATS[name]
    blocks = torch.randint(0, 256, (rows, num_blocks, block_format.num_bytes), dtype=torch.uint8)
    with_offsets = ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "INT4_G128", "INT8_G32")
    for first in [0, 2] if name in with_offsets else [208 if name == "Q6_K" else 0]:
        if name == "FP8_G128":
            blocks[..., :4] = torch.rand(rows, num_blocks, 1).view(torch.uint8)
            blocks[..., 4:] &= 0xFE  # no NaN
        elif name == "MXFP4":
            blocks[..., 0] = blocks[..., 0] % 20 + 110
        else:
            blocks[..., first : first + 2] = torch.randn(rows, num_blocks, 1).half().view(torch.uint8)
    return blocks.flatten(1)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_unpacked_equals_gguf(name: str) -> None:
    blocks = random_blocks(name)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    actual = unpack_blocks(blocks, BLOCK_FORMATS[name]).dequantize().numpy()
    assert np.allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_kernels_equal_the_definition(name: str) -> None:
    blocks = random_blocks(name)
    expected = unpack_blocks(blocks, BLOCK_FORMATS[name]).dequantize()
    assert torch.allclose(dequantize_rows(blocks, BLOCK_FORMATS[name]), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")
def test_kernels_equal_the_definition_for_all_fp8_codes_and_fp4_scales() -> None:
    codes, scales = torch.arange(256, dtype=torch.uint8).view(2, 128), torch.tensor([[1.0], [3.0e-30]])
    scales_of_4_bits = torch.arange(255, dtype=torch.uint8).view(-1, 1)
    for name, blocks in (
        ("FP8_G128", pack_codes(codes, scales, None, BLOCK_FORMATS["FP8_G128"])),
        ("MXFP4", pack_codes(codes[:1, :32].expand(255, -1) % 16, scales_of_4_bits, None, BLOCK_FORMATS["MXFP4"])),
    ):
        expected = unpack_blocks(blocks, BLOCK_FORMATS[name]).dequantize()
        assert torch.equal(dequantize_rows(blocks, BLOCK_FORMATS[name]).nan_to_num(nan=9), expected.nan_to_num(nan=9))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "MXFP4", "INT4_G128", "INT8_G32", "NF4", "FP8_G128"])
def test_packing_codes_is_the_inverse(name: str) -> None:
    block_format, columns = BLOCK_FORMATS[name], 256
    codes = torch.randint(0, 256 if name in ("Q8_0", "INT8_G32", "FP8_G128") else 16, (5, columns), dtype=torch.uint8)
    if name == "FP8_G128":
        codes &= 0xFE
    scales = torch.rand(5, 2).half().float()  # of groups of 128 columns
    stored = torch.randint(100, 140, (5, 2)) if name == "MXFP4" else scales
    offsets = torch.randn(5, 2).half().float() if name in ("Q4_1", "INT4_G128", "INT8_G32") else None
    blocks = pack_codes(codes, stored, offsets, block_format)
    assert blocks.shape == (5, columns // block_format.block_size * block_format.num_bytes)
    unpacked = unpack_blocks(blocks, block_format)
    assert torch.equal(unpacked.codes.view(torch.uint8) ^ (0x80 if name == "INT8_G32" else 0), codes)
    if name == "MXFP4":
        scales = torch.exp2(stored.float() - 127)
    repeated = scales.repeat_interleave(unpacked.scales.shape[-1] // 2, -1)
    assert torch.equal(unpacked.scales, repeated)
    if offsets is not None:
        assert unpacked.offsets is not None
        assert torch.equal(unpacked.offsets, offsets.repeat_interleave(unpacked.scales.shape[-1] // 2, -1))
