"""compressed-tensors checkpoints, written from the definition of the formats: dequantized, packed, and damaged."""

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
    pack_rows,
    quantize_groups,
    save_checkpoints,
)
from torch import Tensor

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.quantization.block_formats import FP4_VALUES

Q_PROJ = "model.layers.0.self_attn.q_proj"
BF16, FP16 = torch.bfloat16, torch.float16


def config(format: str = "pack-quantized", num_bits: int = 4, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": num_bits, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def integers(
    bits: int = 4,
    group_size: int = 128,
    *,
    symmetric: bool = True,
    packed: bool = True,
    actorder: bool = False,
    dtype: torch.dtype = BF16,
) -> Callable[[Tensor], QuantizedMatrix]:
    """pack-quantized, and int-quantized if not `packed`."""

    def quantize(weight: Tensor) -> QuantizedMatrix:
        rows, columns = weight.shape
        groups = torch.arange(columns) // (columns if group_size == -1 else group_size)
        if actorder:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        codes, scales, zeros = quantize_groups(weight, bits, groups, symmetric=symmetric)
        middle = 1 << bits - 1
        numbers, zero_points, scales = codes - middle, zeros - middle, scales.to(dtype)
        restored = (numbers.to(dtype) - zero_points.to(dtype)[:, groups]) * scales[:, groups]
        tensors = {"weight_scale": scales}
        if packed:
            tensors |= {"weight_packed": pack_rows(codes, bits), "weight_shape": torch.tensor([rows, columns])}
        else:
            tensors["weight"] = numbers.to(torch.int8)
        if not symmetric:
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T if packed else zero_points.to(torch.int8)
        if actorder:
            tensors["weight_g_idx"] = groups.int()
        return QuantizedMatrix(tensors, restored, offset_error(scales, zeros))

    return quantize


def fp8(strategy: str, scale_dtype: torch.dtype = BF16) -> Callable[[Tensor], QuantizedMatrix]:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        rows, columns = weight.shape
        tile = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, 128), "block": (96, 128)}[strategy]
        scales = torch.empty(-(-rows // tile[0]), -(-columns // tile[1]))
        full = torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
                scales[i, j] = (weight[part].float().abs().max() / 448).to(scale_dtype)
                full[part] = scales[i, j]
        codes = (weight.float() / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = scales.to(scale_dtype)
        stored = scales.flatten() if strategy == "tensor" else scales
        return QuantizedMatrix({"weight": codes, "weight_scale": stored}, codes.float() * full)

    return quantize


def fp4(kind: str) -> Callable[[Tensor], QuantizedMatrix]:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        size = 32 if kind == "mxfp4" else 16
        groups = weight.float().unflatten(-1, (-1, size))
        absmax = groups.abs().amax(-1)
        tensors = {}
        if kind == "mxfp4":
            exponents = torch.floor(torch.log2(absmax)) - 2
            scales = torch.exp2(exponents)
            tensors["weight_scale"] = (exponents + 127).to(torch.uint8)
        else:
            global_scale = torch.tensor([448 * 6]) / weight.float().abs().max()
            stored = (absmax / 6 * global_scale).to(torch.float8_e4m3fn)
            scales = stored.float() / global_scale
            tensors |= {"weight_scale": stored, "weight_global_scale": global_scale}
        values = torch.tensor(FP4_VALUES)
        codes = (groups / scales[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1)
        restored = (values[codes] * scales[..., None]).flatten(-2).bfloat16()
        flat = codes.flatten(-2).to(torch.uint8)
        tensors["weight_packed"] = flat[:, 0::2] | flat[:, 1::2] << 4
        return QuantizedMatrix(tensors, restored)

    return quantize


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({}, {"INT4_G128"}),
        ({"dtype": FP16}, {"INT4_G128"}),
        ({"symmetric": False}, {"INT4_G128"}),
        ({"group_size": 32}, {"Q4_0"}),
        ({"group_size": 64, "symmetric": False}, {"Q4_1"}),
        ({"group_size": -1}, {"INT4_G128"}),
        ({"group_size": 16}, set()),
        ({"actorder": True}, {"INT4_G128"}),
        ({"actorder": True, "group_size": 32}, {"Q4_0"}),
        ({"bits": 8, "group_size": -1}, {"Q8_0"}),
        ({"bits": 8, "symmetric": False, "group_size": 64}, {"INT8_G32"}),
        ({"bits": 3}, {"INT4_G128"}),
        ({"bits": 5, "symmetric": False}, {"Q8_0"}),
        ({"bits": 8, "group_size": -1, "packed": False}, {"Q8_0"}),
        ({"bits": 8, "group_size": 32, "packed": False, "symmetric": False}, {"INT8_G32"}),
    ],
)
def test_integers(options: dict[str, Any], formats: set[str], tmp_path: Path) -> None:
    bits, dtype = options.get("bits", 4), options.get("dtype", BF16)
    method = config("pack-quantized" if options.get("packed", True) else "int-quantized", bits)
    saved = save_checkpoints(tmp_path, integers(**options), method, dtype=dtype)
    check_checkpoints(saved, formats, tmp_path)


@pytest.mark.parametrize("scale_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_fp8(strategy: str, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {"block_structure": [96, 128]} if strategy == "block" else {}
    method = config("float-quantized", 8, type="float", strategy=strategy, **weights)
    saved = save_checkpoints(tmp_path, fp8(strategy, scale_dtype), method, dtype=BF16)
    check_checkpoints(saved, {"FP8_G128"}, tmp_path)


@pytest.mark.parametrize(("kind", "formats"), [("mxfp4", {"MXFP4"}), ("nvfp4", set())])
def test_fp4(kind: str, formats: set[str], tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, fp4(kind), config(f"{kind}-pack-quantized", type="float"), dtype=BF16)
    check_checkpoints(saved, formats, tmp_path)


def test_int8_in_blocks(tmp_path: Path) -> None:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 96), columns // 64).bfloat16() * 0.01
        full = scales.repeat_interleave(96, 0)[:rows].repeat_interleave(64, 1)
        codes = (weight / full).round().clamp(-128, 127).to(torch.int8)
        return QuantizedMatrix({"weight": codes, "weight_scale": scales}, codes.bfloat16() * full)

    method = config("int-quantized", 8, strategy="block", block_structure=[96, 64])
    check_checkpoints(save_checkpoints(tmp_path, quantize, method, dtype=BF16), {"Q8_0"}, tmp_path)


def test_mixed_precision(tmp_path: Path) -> None:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        return integers()(weight) if weight.shape[1] == 256 else fp8("channel")(weight)

    saved = save_checkpoints(tmp_path, quantize, config("mixed-precision"), dtype=BF16)
    check_checkpoints(saved, {"INT4_G128", "FP8_G128"}, tmp_path)


def test_activations_are_reported(tmp_path: Path) -> None:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        matrix = fp8("tensor")(weight)
        matrix.tensors["input_scale"] = torch.ones(1)
        return matrix

    method = config("float-quantized", 8, type="float")
    method["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    method["kv_cache_scheme"] = {"num_bits": 8}
    saved = save_checkpoints(tmp_path, quantize, method, dtype=BF16)
    edit_tensors(saved.quantized, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    check_checkpoints(saved, {"FP8_G128"}, tmp_path)
    report = ct.load(saved.quantized).load_report
    assert report is not None
    assert str(report).count("activations are not quantized") == 1
    assert "the KV cache is not quantized" in str(report)
    assert f"{Q_PROJ}.input_scale" in report.ignored_weights


def set_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: edit_tensors(path, lambda tensors: tensors.pop(name))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scales": (remove(f"{Q_PROJ}.weight_scale"), "weight_scale' is missing"),
    "no shape": (remove(f"{Q_PROJ}.weight_shape"), "weight_shape' is missing"),
    "another shape": (set_tensor(f"{Q_PROJ}.weight_shape", lambda t: t * 2), "config.json and weights do not match"),
    "negative shape": (set_tensor(f"{Q_PROJ}.weight_shape", lambda t: -t), "config.json and weights do not match"),
    "shape of three sizes": (set_tensor(f"{Q_PROJ}.weight_shape", lambda t: t.repeat(2)[:3]), r"has shape \[3\]"),
    "scales of another shape": (set_tensor(f"{Q_PROJ}.weight_scale", lambda t: t[:5]), r"shape \[5, 1\]"),
    "scales of too many groups": (
        set_tensor(f"{Q_PROJ}.weight_scale", lambda t: t.repeat(1, 3)),
        r"shape \[128, 3\] and do not match",
    ),
    "integer scales": (set_tensor(f"{Q_PROJ}.weight_scale", lambda t: t.to(torch.int8)), "dtype int8"),
    "no zero points of rows": (
        set_tensor(f"{Q_PROJ}.weight_zero_point", lambda t: t[:3]),
        r"weight_zero_point' in 'model.safetensors' has shape \[3, 1\]",
    ),
    "another number of bits": (
        lambda path: edit_quantization_config(path, config_groups=config(num_bits=8)["config_groups"]),
        "with 8 bits does not have",
    ),
    "groups are a list": (lambda path: edit_quantization_config(path, config_groups=[1]), "not objects by name"),
    "sparse": (lambda path: edit_quantization_config(path, format="sparse-24-bitmask"), "cutaway supports pack-quant"),
    "sparsity_config": (
        lambda path: edit_quantization_config(path, sparsity_config={"format": "sparse-bitmask"}),
        "sparsity_config",
    ),
    "transforms": (
        lambda path: edit_quantization_config(path, transform_config={"config_groups": {"R1": {}}}),
        "transform_config",
    ),
    "not compressed": (
        lambda path: edit_quantization_config(path, quantization_status="frozen"),
        "quantization_status",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(name: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    saved = save_checkpoints(tmp_path, integers(symmetric=False), config(), dtype=BF16)
    damage(saved.quantized)
    with pytest.raises(CutawayError, match=message):
        ct.load(saved.quantized)


def test_group_out_of_range_is_refused(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, integers(actorder=True, group_size=32), config(), dtype=BF16)
    edit_tensors(saved.quantized, lambda tensors: tensors[f"{Q_PROJ}.weight_g_idx"].fill_(4))
    with pytest.raises(CutawayError, match="group outside of the 4 groups"):
        ct.load(saved.quantized)
    edit_tensors(saved.quantized, lambda tensors: tensors[f"{Q_PROJ}.weight_g_idx"].fill_(-1))
    ct.load(saved.quantized)  # -1 means that the order is not used


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, fp8("channel"), config("float-quantized", 8), dtype=BF16)
    edit_tensors(saved.quantized, lambda tensors: tensors.pop(f"{Q_PROJ}.weight_scale"))
    with pytest.raises(CutawayError, match=r"scales of tensor .*q_proj.weight' are missing"):
        ct.load(saved.quantized)
