"""Models with packed weights on a GPU: the tokens and log-probabilities are those of dequantized weights."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from families.gguf.test_load_save import save_random_model

import cutaway as ct
from cutaway.families.gguf.load_save import save_gguf
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.quantization.quantized_tensor import CUDAQuantizedTensor

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

PROMPTS = [[5, 17, 3], [(7 * i) % 97 for i in range(80)], [1]]


def packed_names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if isinstance(parameter, CUDAQuantizedTensor)]


def run_requests(model: Any, **options: Any) -> list[Any]:
    engine = Engine(EngineConfig(model, max_num_seqs=4, max_model_len=160, **options))
    params = SamplingParams(max_new_tokens=20, temperature=0.0, logprobs=0)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS]
    engine.run()
    return [request.result() for request in requests]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2", "gpt2", "phi3"])
@pytest.mark.parametrize("quantization", ["q8_0", "q4_1"])
def test_packed_equals_dequantized(arch: str, quantization: str, tmp_path: Path) -> None:
    _, checkpoint, _ = save_random_model(arch, 0, tmp_path)
    path = save_gguf(checkpoint, tmp_path / "quantized.gguf", quantization=quantization)
    plain, packed = ct.load(path, device="cuda"), ct.load(path, device="cuda", dequantize=False)
    assert packed_names(packed.model)
    assert not packed_names(plain.model)
    tokens = torch.randint(0, 97, (2, 70), device="cuda")
    with torch.no_grad():
        expected = plain.model(tokens)
        assert torch.allclose(packed.model(tokens), expected, atol=2e-3 * float(expected.abs().max()))
        assert torch.allclose(copy.deepcopy(packed.model)(tokens), packed.model(tokens))
    for options in ({"compile": True}, {"compile": False}):
        results = (run_requests(each.model, **options) for each in (plain, packed))
        for first, second in zip(*results, strict=True):
            assert first.tokens == second.tokens
            assert torch.allclose(torch.tensor(first.logprobs), torch.tensor(second.logprobs), atol=5e-3)


def test_matrices_of_different_formats(tmp_path: Path) -> None:
    """Query, key and value, or gate and up, whose formats differ, cannot be one matrix."""
    _, checkpoint, _ = save_random_model("llama", 0, tmp_path)
    first = ct.load(save_gguf(checkpoint, tmp_path / "a.gguf", quantization="q8_0"), device="cuda", dequantize=False)
    other = ct.load(save_gguf(checkpoint, tmp_path / "b.gguf", quantization="q4_1"), device="cuda", dequantize=False)
    for block, block_other in zip(first.model.decoder.blocks, other.model.decoder.blocks, strict=True):
        block.attn.f.v.weight, block.ffn.f.up.weight = block_other.attn.f.v.weight, block_other.ffn.f.up.weight
    plain: Any = copy.deepcopy(first.model)
    for module in plain.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, CUDAQuantizedTensor):
                setattr(module, name, torch.nn.Parameter(parameter.dequantize(), requires_grad=False))
    results = zip(run_requests(plain, compile=True), run_requests(first.model, compile=True), strict=True)
    assert all(expected.tokens == result.tokens for expected, result in results)


def test_memory_is_that_of_the_packed_weights(tmp_path: Path) -> None:
    config = ct.config("tiny-llama").model_dump()
    config |= {"d_model": 512, "vocab_size": 8192}
    model = ct.build(ct.config(config), seed=0)
    path = save_gguf(model, tmp_path / "model.gguf", quantization="q8_0")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    packed = ct.load(path, device="cuda", dequantize=False)
    run_requests(packed.model, compile=True)
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 1.15 * path.stat().st_size + 2**20
