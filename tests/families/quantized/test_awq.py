"""AWQ checkpoints, written from the definition of the layout gemm: dequantized, packed, and damaged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantized_checkpoints import (
    QuantizedMatrix,
    check_checkpoints,
    edit_quantization_config,
    edit_tensors,
    offset_error,
    quantize_groups,
    save_checkpoints,
)
from torch import Tensor

import cutaway as ct
from cutaway.errors import CutawayError

Q_PROJ = "model.layers.0.self_attn.q_proj"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_gemm(codes: Tensor) -> Tensor:
    """(rows, columns) → (rows, columns / 8): nibble i of a word is the number ORDER[i] of its 8 columns."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, place in enumerate(ORDER):
        words |= codes[:, place::8].long() << 4 * i
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(group_size: int = 128) -> Callable[[Tensor], QuantizedMatrix]:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        columns = weight.shape[1]
        groups = torch.arange(columns) // (columns if group_size == -1 else group_size)
        codes, scales, zeros = quantize_groups(weight, 4, groups, symmetric=False)
        restored = (codes - zeros[:, groups]) * scales[:, groups]
        tensors = {"qweight": pack_gemm(codes.T), "qzeros": pack_gemm(zeros.T), "scales": scales.T}
        return QuantizedMatrix(tensors, restored, offset_error(scales, zeros))

    return quantize


def awq_config(**values: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"} | values


@pytest.mark.parametrize(
    ("group_size", "formats"), [(128, {"INT4_G128"}), (64, {"Q4_1"}), (32, {"Q4_1"}), (-1, {"INT4_G128"}), (16, set())]
)
def test_awq(group_size: int, formats: set[str], tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, awq(group_size), awq_config(group_size=group_size))
    check_checkpoints(saved, formats, tmp_path)


def test_bf16_checkpoint_with_fp16_scales(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, awq(), awq_config(version="GEMM"), dtype=torch.bfloat16)
    check_checkpoints(saved, {"INT4_G128"}, tmp_path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing scales": (
        lambda path: edit_tensors(path, lambda tensors: tensors.pop(f"{Q_PROJ}.scales")),
        r"'.*q_proj.scales' is missing",
    ),
    "zero points of another shape": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.qzeros": tensors[f"{Q_PROJ}.qzeros"][:, :2].clone()})
        ),
        r"shape \[1, 2\], but .* requires \[1, 16\]",
    ),
    "scales without groups": (
        lambda path: edit_tensors(path, lambda tensors: tensors.update({f"{Q_PROJ}.scales": torch.zeros(0, 128)})),
        "q_proj.scales' in 'model.safetensors' has shape",
    ),
    "floating-point codes": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({f"{Q_PROJ}.qweight": tensors[f"{Q_PROJ}.qweight"].half()})
        ),
        "dtype float16, not int32",
    ),
    "version gemv": (lambda path: edit_quantization_config(path, version="gemv"), "version 'gemv'; cutaway supports"),
    "format gemv_fast": (lambda path: edit_quantization_config(path, version=None, format="gemv_fast"), "gemv_fast"),
    "llm-awq": (lambda path: edit_quantization_config(path, backend="llm-awq"), "backend 'llm-awq'"),
    "5 bits": (lambda path: edit_quantization_config(path, bits=5), "bits 5; cutaway supports one of 4"),
    "group size 0": (lambda path: edit_quantization_config(path, group_size=0), "group_size 0"),
    "group size 48": (
        lambda path: edit_quantization_config(path, group_size=48),
        "not a multiple of the group size 48",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    saved = save_checkpoints(tmp_path, awq(), awq_config())
    damage(saved.quantized)
    with pytest.raises(CutawayError, match=message):
        ct.load(saved.quantized)
