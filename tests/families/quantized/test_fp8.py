"""Quantized checkpoints: MXFP4 (gpt-oss) and FP8 (DeepSeek), against dequantization in transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_parity import randomize_weights
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import cutaway as ct
from cutaway.errors import CutawayError
from cutaway.families.quantized.fp8 import FP8Reader
from cutaway.families.quantized.mxfp4 import MXFP4Reader
from cutaway.families.quantized.reader import ReadOptions
from cutaway.families.safetensors_reader import SafetensorsReader


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
    resaved = ct.load(ct.save(checkpoint, tmp_path / "bf16"))
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, resaved.model.state_dict()[name]), name


def test_unsupported_quantization_is_an_error(tmp_path: Path) -> None:
    out = ct.save(ct.build("tiny-llama", seed=0), tmp_path / "x")
    hf_config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(hf_config | {"quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(CutawayError, match="aqlm"):
        ct.load(out)
