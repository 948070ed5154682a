"""LoRA adapters on packed weights: equal to those on dequantized weights."""

import json
from pathlib import Path

import pytest
import torch
from families.quantized.test_gptq import gptq, gptq_config
from safetensors.torch import save_file
from support.quantized_checkpoints import HIDDEN, INTERMEDIATE, packed_formats, save_checkpoints

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.errors import InputError


@pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")
@pytest.mark.parametrize("desc_act", [False, True])
def test_adapters_on_packed_weights(desc_act: bool, tmp_path: Path) -> None:
    saved = save_checkpoints(tmp_path, gptq(desc_act=desc_act), gptq_config(desc_act=desc_act))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    torch.manual_seed(0)
    tensors = {}
    for layer in range(2):
        for name, (rows, columns) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors |= {f"{stem}.lora_A.weight": torch.randn(4, columns) * 0.1}
            tensors |= {f"{stem}.lora_B.weight": torch.randn(rows, 4) * 0.1}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    config |= {"target_modules": ["q_proj", "down_proj"], "base_model_name_or_path": str(saved.quantized)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    plain = ct.load(saved.quantized, dtype=torch.float32)
    tokens = torch.randint(3, 97, (2, 9))
    packed = ct.load(saved.quantized, adapters=adapter, dtype=torch.float32, dequantize=False)
    assert packed_formats(packed.model) == {"INT4_G128"}
    with torch.no_grad():
        base_logits = plain.model(tokens)
        expected = ct.load(saved.quantized, adapters=adapter, dtype=torch.float32).model(tokens)
        bound = 2e-3 * float(expected.abs().max())
        assert (expected - base_logits).abs().max() > 10 * bound
        logits = packed.model(tokens)
        assert torch.allclose(logits, expected, atol=bound)
        merged = packed.model.merge_and_unload()
        assert torch.allclose(merged(tokens), logits, atol=1e-4 * float(expected.abs().max()))
        saved_logits = ct.load(ct.save(packed, tmp_path / "saved")).model(tokens)
        assert torch.allclose(saved_logits, logits, atol=1e-4 * float(expected.abs().max()))
    first, second = (
        ct.generate(ct.load(saved.quantized, adapters=adapter, dtype=torch.float32, dequantize=dequantize), [[5, 17]],
                    max_new_tokens=6, temperature=0.0)[0].tokens
        for dequantize in (True, False)
    )  # fmt: skip
    assert first == second
    with pytest.raises(InputError, match="merge_and_unload"):
        packed.model.merge_adapter()
