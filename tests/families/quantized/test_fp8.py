"""FP8 and MXFP4 (gpt-oss) checkpoints, against dequantization in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_parity import randomize_weights
from support.quantized_checkpoints import (
    Quantize,
    QuantizedMatrix,
    check_checkpoints,
    edit_tensors,
    save_checkpoints,
)
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.errors import CutawayError
from cutaway.families.quantized.fp8 import FP8Reader
from cutaway.families.quantized.mxfp4 import MXFP4Reader
from cutaway.families.quantized.reader import ReadOptions
from cutaway.families.safetensors_reader import SafetensorsReader
from cutaway.families.verify import verify
from cutaway.quantization.quantized_tensor import QuantizedTensor

Q_PROJ = "model.layers.0.self_attn.q_proj"


def test_mxfp4_matches_transformers(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=g, dtype=torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales, "y": torch.ones(2)}, tmp_path / "a.safetensors")
    reader = MXFP4Reader(SafetensorsReader([tmp_path / "a.safetensors"]), {}, ReadOptions())
    assert reader.tensor_infos.keys() == {"x", "y"}
    assert torch.equal(reader.read_tensor("x"), convert_moe_packed_tensors(blocks, scales))
    assert reader.tensor_infos["x"].shape == reader.read_tensor("x").shape


@pytest.mark.parametrize("shape", [(256, 256), (200, 384), (64, 96)])
def test_fp8_tiles_are_scaled(shape: tuple[int, int], tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=g).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=g)
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "a.safetensors")
    expected = weight.float()
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            expected[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= scales[row, column]
    reader = FP8Reader(SafetensorsReader([tmp_path / "a.safetensors"]), {}, ReadOptions())
    assert reader.tensor_infos.keys() == {"w.weight"}
    assert torch.equal(reader.read_tensor("w.weight"), expected.to(torch.bfloat16))


def test_mxfp4_gpt_oss_matches_transformers(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        pad_token_id=0,
    )
    model = transformers.GptOssForCausalLM(config).to(torch.bfloat16).eval()
    randomize_weights(model, 0)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    g = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), generator=g, dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            120, 125, (experts, rows, columns // 32), generator=g, dtype=torch.uint8
        )
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_config = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"quantization_config": quantization}))
    checkpoint = ct.load(tmp_path)
    assert checkpoint.load_report is not None
    assert checkpoint.load_report.ok
    assert checkpoint.load_report.stored_dtypes["mxfp4"] == 4
    peer = transformers.GptOssForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).eval()
    tokens = torch.randint(0, 97, (2, 11), generator=g)
    with torch.no_grad():
        logits, peer_logits = ct.load(tmp_path, dtype=torch.float32).model(tokens), peer.float()(tokens).logits
    torch.testing.assert_close(logits, peer_logits, atol=1e-5 * float(peer_logits.abs().max()), rtol=0)
    if load_cpu_kernels() is not None:
        packed = ct.load(tmp_path, dtype=torch.float32, dequantize=False)
        experts: Any = packed.model.get_submodule("decoder.blocks.1.ffn.f.experts")
        for each in (experts.gate, experts.up, experts.down):
            assert isinstance(each.weight, QuantizedTensor)
            assert each.weight.nbytes * 32 == each.weight.numel() * 17
        with torch.no_grad():
            torch.testing.assert_close(packed.model(tokens), logits, atol=1e-4 * float(logits.abs().max()), rtol=0)
        options: Any = {"max_new_tokens": 8, "temperature": 0.0}
        plain = ct.load(tmp_path, dtype=torch.float32)
        (expected,), (result,) = (ct.generate(each, [[1, 2, 3]], **options) for each in (plain, packed))
        assert result.tokens == expected.tokens
    resaved = ct.load(ct.save(checkpoint, tmp_path / "bf16"))
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, resaved.model.state_dict()[name]), name


def test_unsupported_quantization_is_an_error(tmp_path: Path) -> None:
    out = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "x")
    hf_config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(hf_config | {"quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(CutawayError, match="aqlm"):
        ct.load(out)


def fp8(scales_shape: str, suffix: str, scales_dtype: torch.dtype = torch.float32) -> Quantize:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        rows, columns = weight.shape
        tile = {"tensor": (rows, columns), "row": (1, columns), "block": (32, 64), "large block": (128, 128)}[
            scales_shape
        ]
        scales = torch.rand(-(-rows // tile[0]), -(-columns // tile[1])).to(scales_dtype) * 0.01
        full = scales.float().repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
        codes = (weight.float() / full).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = scales.view(()) if scales_shape == "tensor" else scales
        return QuantizedMatrix({"weight": codes, f"weight{suffix}": stored}, codes.float() * full)

    return quantize


@pytest.mark.parametrize(
    ("quantize", "config", "formats"),
    [
        (fp8("large block", "_scale_inv"), {"weight_block_size": [128, 128]}, {"FP8_G128"}),
        (fp8("block", "_scale_inv"), {"weight_block_size": [32, 64]}, set()),
        (fp8("tensor", "_scale_inv", torch.bfloat16), {"weight_block_size": None}, {"FP8_G128"}),
        (fp8("tensor", "_scale"), {"activation_scheme": "static"}, {"FP8_G128"}),
        (fp8("row", "_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {"FP8_G128"}),
    ],
)
def test_fp8_checkpoints(quantize: Quantize, config: dict[str, Any], formats: set[str], tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, quantize, {"quant_method": "fp8"} | config, dtype=torch.bfloat16)
    check_checkpoints(saved, formats, tmp_path)


@pytest.mark.parametrize("scales_shape", ["large block", "tensor"])
def test_fp8_matches_transformers(scales_shape: str, tmp_path: Path) -> None:
    block_size = None if scales_shape == "tensor" else [128, 128]
    config = {"quant_method": "fp8", "weight_block_size": block_size, "modules_to_not_convert": ["lm_head"]}
    saved = save_checkpoints(tmp_path, fp8(scales_shape, "_scale_inv"), config, dtype=torch.bfloat16)
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        saved.quantized,
        quantization_config=transformers.FineGrainedFP8Config(weight_block_size=block_size, dequantize=True),
        dtype=torch.bfloat16,
    )
    expected = peer.state_dict()["model.layers.0.mlp.down_proj.weight"]
    model = ct.load(saved.quantized).model
    assert torch.equal(model.state_dict()["decoder.blocks.0.ffn.f.down.weight"], expected)


def test_scales_of_activations_are_ignored(tmp_path: Path) -> None:
    def quantize(weight: Tensor) -> QuantizedMatrix:
        matrix = fp8("tensor", "_scale")(weight)
        matrix.tensors["input_scale"] = torch.ones(())
        return matrix

    saved = save_checkpoints(
        tmp_path, quantize, {"quant_method": "fp8", "activation_scheme": "static"}, dtype=torch.bfloat16
    )
    check_checkpoints(saved, {"FP8_G128"}, tmp_path)
    assert "activations are not quantized" in str(ct.load(saved.quantized).load_report)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q_PROJ}.weight_scale_inv"), "scales of tensor .* are missing"),
        (lambda tensors: tensors.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(2, 2)}), "do not match its shape"),
        (lambda tensors: tensors.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(0)}), "is empty"),
        (lambda tensors: tensors.update({f"{Q_PROJ}.weight_scale_inv": torch.ones(1, 1).long()}), "dtype int64"),
        (lambda tensors: tensors[f"{Q_PROJ}.weight_scale_inv"].fill_(float("inf")), "infinite"),
    ],
)
def test_damaged_scales_are_refused(edit: Any, message: str, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    saved = save_checkpoints(tmp_path, fp8("large block", "_scale_inv"), config, dtype=torch.bfloat16)
    edit_tensors(saved.quantized, edit)
    for dequantize in (True, False):
        with pytest.raises(CutawayError, match=message):
            ct.load(saved.quantized, dequantize=dequantize)


def test_fp8_experts(tmp_path: Path) -> None:
    """Experts of one tensor (experts, out, in), with one scale per tile."""
    weight = torch.randn(3, 256, 128).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 1)
    save_file({"x": weight, "x_scale_inv": scales}, tmp_path / "a.safetensors")
    reader = FP8Reader(SafetensorsReader([tmp_path / "a.safetensors"]), {}, ReadOptions(packed=True))
    expected = (weight.float() * scales.repeat_interleave(128, 1)).bfloat16()
    assert torch.equal(reader.read_tensor("x", packed=True), expected)


def test_exponents_as_scales(tmp_path: Path) -> None:
    """Scales in E8M0 are powers of 2."""
    weight, exponents = torch.randn(128, 128).to(torch.float8_e4m3fn), torch.tensor([[120]], dtype=torch.uint8)
    for scales in (exponents, exponents.view(torch.float8_e8m0fnu)):
        save_file({"x": weight, "x_scale_inv": scales}, tmp_path / "a.safetensors")
        reader = FP8Reader(SafetensorsReader([tmp_path / "a.safetensors"]), {}, ReadOptions())
        assert torch.equal(reader.read_tensor("x"), (weight.float() / 128).bfloat16())


def test_huge_block_size(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [10**30, 10**30]}
    saved = save_checkpoints(tmp_path, fp8("tensor", "_scale_inv"), config, dtype=torch.bfloat16)
    check_checkpoints(saved, {"FP8_G128"}, tmp_path)


def test_verify(tmp_path: Path) -> None:
    """transformers opens a dequantized copy."""
    for method in ("fbgemm_fp8", "fp8"):
        saved = save_checkpoints(
            tmp_path / method, fp8("row", "_scale"), {"quant_method": method}, dtype=torch.bfloat16
        )
        assert verify(saved.quantized).ok
