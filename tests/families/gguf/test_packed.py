"""GGUF files loaded with dequantize=False: packed matrices give the results of dequantized ones."""

import copy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families.gguf.test_load_save import save_random_model

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.errors import InputError, WeightError
from cutaway.families.gguf.architectures import GGUF_ARCHITECTURES
from cutaway.families.gguf.load_save import save_gguf
from cutaway.quantization.quantized_tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")


def packed_names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedTensor)]


@pytest.mark.parametrize("arch", GGUF_ARCHITECTURES)
def test_packed_equals_dequantized(arch: str, tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model(arch, 0, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0" if arch != "qwen2" else "q4_1")
    plain, packed = ct.load(path), ct.load(path, dequantize=False)
    assert len(packed_names(packed.model)) >= 5 * plain.model.config.stacks["decoder"].layers
    assert packed_names(plain.model) == []
    for (name, expected), actual in zip(
        plain.model.state_dict().items(), packed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(actual.dequantize() if isinstance(actual, QuantizedTensor) else actual, expected), name
    tokens = torch.randint(0, 97, (2, 20))
    with torch.no_grad():
        expected = plain.model(tokens)
        assert torch.allclose(packed.model(tokens), expected, atol=1e-4 * float(expected.abs().max()))
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "logprobs": 0}
    (first,), (second,) = (ct.generate(each, [[5, 17, 3]], **options) for each in (plain, packed))
    assert first.tokens == second.tokens
    assert np.allclose(first.logprobs or [], second.logprobs or [], atol=2e-3)


def test_packed_model_is_copied_cast_and_saved(tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("llama", 1, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0")
    plain, packed = ct.load(path), ct.load(path, dequantize=False)
    names, tokens = packed_names(packed.model), torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        expected = plain.model(tokens)
        clone = copy.deepcopy(packed.model)
        assert packed_names(clone) == names
        assert torch.allclose(clone(tokens), expected, atol=1e-4)
        clone = clone.bfloat16()
        assert packed_names(clone) == names
        assert clone.dtype == torch.bfloat16
        assert torch.allclose(clone(tokens).float(), expected, atol=0.1 * float(expected.abs().max()))
    ct.save(packed, tmp_path / "saved")
    saved = ct.load(tmp_path / "saved").model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in plain.model.state_dict().items())


def test_gradients_of_activations_flow_through_packed_weights(tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("llama", 1, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0")
    grads = []
    for each in (ct.load(path), ct.load(path, dequantize=False)):
        block = each.model.stacks["decoder"].blocks[0]
        x: list[torch.Tensor] = []
        handle = block.register_forward_hook(lambda module, args, y, x=x: x.append(y.detach().requires_grad_()) or x[0])
        logits = each.model(torch.arange(7)[None])
        handle.remove()
        grads.append(torch.autograd.grad(logits[0, -1].max(), x[0])[0])
    assert torch.allclose(grads[0], grads[1], atol=1e-3 * float(grads[0].abs().max()))


def test_options_that_need_plain_weights(tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("llama", 1, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0")
    packed = ct.load(path, dequantize=False)
    options: list[dict[str, Any]] = [{"weight_bits": 8}, {"compile": True}]
    for each in options:
        with pytest.raises(InputError, match="dequantize=True"):
            ct.generate(packed, [[1, 2]], max_new_tokens=2, **each)


def test_damaged_scale_is_found(tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model("llama", 1, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0")
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == "blk.0.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16("inf").tobytes()
    path.write_bytes(data)
    with pytest.raises(WeightError, match="NaN or infinit"):
        ct.load(path, dequantize=False)


def test_without_a_compiler_weights_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint, _ = save_random_model("llama", 1, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization="q8_0")
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    load_cpu_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="install gcc or clang"):
            checkpoint = ct.load(path, dequantize=False)
    finally:
        load_cpu_kernels.cache_clear()
    assert packed_names(checkpoint.model) == []
