"""Loss of a model with packed weights: that of the dequantized weights, and close to that of the original ones."""

import copy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.families.gguf.load_save import save_gguf
from cutaway.families.quantized.matrix import QuantizedMatrix
from cutaway.quantization.block_formats import BLOCK_FORMATS, FP4_VALUES, NF4_VALUES, pack_weights
from cutaway.quantization.quantized_tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")
TEXT = "Once upon a time there was an old man who lived in a small house near the sea. Every morning he walked to the"
# Maximum increase of the loss in nats per token, by bits per weight: about twice the increase that was measured.
MAX_INCREASE = {4: 0.2, 5: 0.04, 6: 0.03, 8: 0.01}


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return ct.load("tiny-english", dtype=torch.float32)


def losses(model: Any, tokens: list[int]) -> Tensor:
    """Losses of the tokens, of which products read 3 rows (integers), 12 rows (packed), and all (dequantized)."""
    results = []
    with torch.no_grad():
        for length in (4, 13, len(tokens)):
            part = torch.tensor(tokens[:length])
            results.append(F.cross_entropy(model(part[None, :-1])[0], part[1:]))
    return torch.stack(results)


def pack(weight: Tensor, name: str) -> QuantizedTensor | None:
    """The matrix in a block format, with scales from the largest weight of a group. None if columns are not blocks."""
    block_format, columns = BLOCK_FORMATS[name], weight.shape[1]
    if columns % block_format.block_size:
        return None
    if name in ("Q4_1", "Q8_0") or name.endswith("_K"):
        return QuantizedTensor(pack_weights(weight, block_format), block_format)
    if name in ("Q4_0", "Q5_0", "Q5_1"):
        packed = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
        return QuantizedTensor(torch.from_numpy(packed), block_format)
    groups, size = torch.arange(columns) // block_format.block_size, block_format.block_size
    largest = weight.unflatten(-1, (-1, size)).abs().amax(-1)
    values = {"INT4_G128": range(-8, 8), "NF4": NF4_VALUES, "MXFP4": FP4_VALUES}.get(name)
    if name == "INT8_G32":
        low, high = torch.aminmax(weight.unflatten(-1, (-1, size)), dim=-1)
        scales = ((high - low) / 254).half().float()
        zeros = (-low / scales).round().clamp(0, 255)
        codes = (weight / scales.repeat_interleave(size, -1) + zeros.repeat_interleave(size, -1)).round().clamp(0, 255)
        return QuantizedMatrix(codes.to(torch.uint8), scales, groups, zero_points=zeros).pack(torch.float32)
    if values is None:
        scales = largest / 448
        codes = (weight / scales.repeat_interleave(size, -1)).to(torch.float8_e4m3fn)
        return QuantizedMatrix(codes, scales, groups).pack(torch.float32)
    table = torch.tensor(values, dtype=torch.float32)
    scales = largest / table.abs().max()
    scales = torch.exp2(scales.log2().ceil()) if name == "MXFP4" else scales.half().float()
    difference = (weight / scales.repeat_interleave(size, -1)).unsqueeze(-1) - table
    codes = difference.abs().argmin(-1).to(torch.uint8)
    is_integer = name == "INT4_G128"
    return QuantizedMatrix(
        codes, scales, groups, zero_points=8 if is_integer else 0, values=None if is_integer else values, num_bits=4
    ).pack(torch.float32)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_block_format(name: str, checkpoint: Any) -> None:
    packed, plain = copy.deepcopy(checkpoint.model), copy.deepcopy(checkpoint.model)
    num_packed = 0
    for module, peer in zip(packed.modules(), plain.modules(), strict=True):
        if isinstance(module, torch.nn.Linear):
            quantized = pack(module.weight.detach(), name)
            if quantized is not None:
                assert quantized.format.name == name
                module._parameters["weight"] = quantized.as_parameter()  # type: ignore[assignment]
                peer.weight = torch.nn.Parameter(quantized.dequantize())
                num_packed += 1
    assert num_packed >= 36  # all but `down`, whose 688 columns are not whole blocks
    tokens = checkpoint.tokenizer.encode(TEXT)
    expected = losses(plain, tokens)
    assert torch.allclose(losses(packed, tokens), expected, atol=2e-5)
    bits = int(next(digit for digit in name if digit.isdigit()))
    assert expected[-1] - losses(checkpoint.model, tokens)[-1] <= MAX_INCREASE[bits]


@pytest.mark.sample(2)
@pytest.mark.parametrize("quantization", ["q4_k_m", "q6_k", "q5_k_m", "q4_0", "q8_0"])
def test_gguf_quantizations(quantization: str, checkpoint: Any, tmp_path: Path) -> None:
    """The gguf package dequantizes the weights of `plain`."""
    path = save_gguf(checkpoint, tmp_path / "model.gguf", quantization=quantization)
    packed, plain = ct.load(path, dequantize=False).model, ct.load(path).model
    tokens = checkpoint.tokenizer.encode(TEXT)
    assert any(isinstance(weight, QuantizedTensor) for weight in packed.parameters())
    assert torch.allclose(losses(packed, tokens), losses(plain, tokens), atol=2e-5)
    increase = losses(plain, tokens)[-1] - losses(checkpoint.model, tokens)[-1]
    assert increase <= MAX_INCREASE[int(quantization[1])]
