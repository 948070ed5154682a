"""Tiny quantized checkpoints: reference packers of each format, and the checks that apply to all of them."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_parity import randomize_weights
from torch import Tensor

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.quantization.quantized_tensor import QuantizedTensor

HIDDEN, INTERMEDIATE, VOCAB = 128, 256, 97
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WEIGHTS = "model.safetensors"


@dataclass
class QuantizedMatrix:
    """Tensors of one matrix in a format, by the end of their names, and the weights they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor
    scale_error: float = 0.0
    """Maximum difference of the packed matrix from `weight`: rounding of scales and offsets to fp16."""


Quantize = Callable[[Tensor], QuantizedMatrix]


@dataclass
class Checkpoints:
    """A quantized checkpoint, and the same weights in a plain checkpoint."""

    quantized: Path
    plain: Path
    max_errors: dict[str, float] = field(default_factory=dict)


def save_checkpoints(
    directory: Path,
    quantize: Quantize,
    config: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float16,
    model_config: Any = None,
    plain_names: tuple[str, ...] = (),
) -> Checkpoints:
    """Quantize the linear layers of a tiny Llama, except the LM head and layers whose name has one of `plain_names`."""
    model_config = model_config or transformers.LlamaConfig(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(model_config).to(dtype)
    randomize_weights(model, 0)
    saved = Checkpoints(directory / "quantized", directory / "plain")
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layers" in name and not any(each in name for each in plain_names)
    }
    for path in (saved.quantized, saved.plain):
        model.save_pretrained(path)
    tensors = load_file(saved.plain / WEIGHTS)
    quantized = dict(tensors)
    for name in sorted(linears & tensors.keys()):
        matrix = quantize(quantized.pop(name))
        stem = name.removesuffix("weight")
        quantized |= {
            stem + suffix: tensor.clone(memory_format=torch.contiguous_format)
            for suffix, tensor in matrix.tensors.items()
        }
        tensors[name] = matrix.weight.to(dtype)
        saved.max_errors[name] = matrix.scale_error
    save_file(tensors, saved.plain / WEIGHTS, metadata={"format": "pt"})
    save_file(quantized, saved.quantized / WEIGHTS, metadata={"format": "pt"})
    edit_config(saved.quantized, quantization_config=config)
    return saved


def edit_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def edit_quantization_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    edit_config(path, quantization_config=config["quantization_config"] | values)


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


def packed_formats(model: Any) -> set[str]:
    return {each.format.name for each in model.parameters() if isinstance(each, QuantizedTensor)}


def check_checkpoints(saved: Checkpoints, formats: set[str], tmp_path: Path) -> None:
    """Dequantized weights equal the reference; packed ones up to rounding of scales; logits, tokens and saved files."""
    plain, loaded = ct.load(saved.plain), ct.load(saved.quantized)
    assert loaded.load_report is not None
    assert loaded.load_report.ok
    assert "quantization: " in str(loaded.load_report)
    assert ct.config(saved.quantized) == loaded.config == plain.config
    expected = plain.model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name
    exported = ct.save(loaded, tmp_path / "converted")
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    peer = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    reference = ct.load(saved.plain, dtype=torch.float32)
    with torch.no_grad():
        logits = peer(tokens).logits
        assert torch.allclose(reference.model(tokens), logits, atol=1e-5 * float(logits.abs().max()))
    if load_cpu_kernels() is None:
        pytest.skip("there is no C compiler")
    packed = ct.load(saved.quantized, dtype=torch.float32, dequantize=False)
    assert packed_formats(packed.model) == formats
    exact, max_logit = reference.model.state_dict(), float(logits.abs().max())
    bounds = max(saved.max_errors.values())
    for name, tensor in packed.model.state_dict().items():
        difference = (tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor) - exact[name]
        # The plain weights are also rounded to their dtype.
        rounding = float(exact[name].abs().max()) * torch.finfo(expected[name].dtype).eps
        assert difference.abs().max() <= bounds + rounding, name
    unpacked = ct.load(ct.save(packed, tmp_path / "from-packed"))
    for name, tensor in packed.model.state_dict().items():
        plain_tensor = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
        assert torch.equal(unpacked.model.state_dict()[name], plain_tensor), name
    with torch.no_grad():
        packed_logits = packed.model(tokens)
        assert torch.allclose(packed_logits, logits, atol=0.02 * max_logit)
        assert torch.allclose(packed_logits, unpacked.model(tokens), atol=1e-4 * max_logit)
    generated = [
        ct.generate(each, [[5, 17, 3]], max_new_tokens=8, temperature=0.0)[0].tokens for each in (unpacked, packed)
    ]
    assert generated[0] == generated[1]


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Rows of unsigned integers as little-endian sequences of bits, in int32 words."""
    num_words = math.ceil(codes.shape[1] * bits / 32)
    rows = [
        sum(code << bits * i for i, code in enumerate(row)).to_bytes(num_words * 4, "little") for row in codes.tolist()
    ]
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.int32).reshape(len(rows), num_words).copy())


def quantize_groups(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in), scales (out, groups) in fp16 and zero points (out, groups). `groups`: that of each column."""
    num_groups, top = int(groups.max()) + 1, (1 << bits) - 1
    scales, zeros = torch.empty(len(weight), num_groups), torch.empty(len(weight), num_groups, dtype=torch.int32)
    codes = torch.empty(weight.shape, dtype=torch.int32)
    for group in range(num_groups):
        part = weight[:, groups == group].float()
        if symmetric:
            scale = part.abs().amax(1) * 2 / top
            zero = torch.full_like(scale, (top + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / top
            zero = (-low / scale).round().clamp(1, top)  # 0 cannot be stored minus 1
        scale = scale.half().float()
        codes[:, groups == group] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).int()
        scales[:, group], zeros[:, group] = scale, zero.int()
    return codes, scales.half(), zeros


def offset_error(scales: Tensor, zeros: Tensor) -> float:
    """Rounding error of the offsets −zero · scale in fp16."""
    return float((scales.float() * zeros).abs().max()) * 2**-11
