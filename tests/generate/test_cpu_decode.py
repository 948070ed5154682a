"""CPU decode steps with C kernels equal the model, for random configurations, all cache layouts and packed weights."""

from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from support.config_strategies import build_randomized_model, configs

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.fast.cpu_decode_block import CPUDecodeBlock
from cutaway.quantization.block_formats import BLOCK_FORMATS
from cutaway.quantization.quantized_tensor import QuantizedTensor, quantize_blocks

pytestmark = pytest.mark.skipif(load_cpu_kernels() is None, reason="there is no C compiler")
ROPE = {"kind": "rope", "theta": 10000.0, "rotary_dim": None, "layout": "half", "scaling": {"kind": "none"}}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "d_head 20, biases": {"heads": 4, "kv_heads": 4, "d_head": 20, "bias": ("q", "k", "v", "o")},
    "MQA": {"heads": 4, "kv_heads": 1},
    "window": {"window": 9},
    "softcap": {"softcap": 5.0},
    "sink, window": {"sink": True, "window": 7},
    "ALiBi": {"position": {"kind": "alibi"}},
    "interleaved, partial RoPE": {"position": {**ROPE, "rotary_dim": 4, "layout": "interleaved"}},
    "QK-norm": {"qk_norm": {"norm": {"kind": "rmsnorm", "eps": 1e-6, "unit_offset": True}}},
}


def count_fast_blocks(engine: Engine) -> int:
    return sum(isinstance(block, CPUDecodeBlock) for block in engine.model_runner.decode_model.stacks["decoder"].blocks)


def max_logprob_error(model: Any, **options: Any) -> tuple[float, int]:
    """Largest error of the log-probabilities of decoded tokens against one full forward pass of each sequence, and the
    number of blocks that ran in the kernels. Requests join and leave the batch."""
    size = model.config.vocab_size
    engine = Engine(EngineConfig(model, max_num_seqs=3, max_model_len=40, **options))
    prompts = [[(5 * i + 3 * j) % size for j in range(n)] for i, n in enumerate((1, 9, 4, 17))]
    params = [SamplingParams(max_new_tokens=20 - 3 * i, temperature=float(i % 2), logprobs=0) for i in range(4)]
    requests = [engine.submit(p, s, seed=i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    engine.run()
    errors = []
    for prompt, request in zip(prompts, requests, strict=True):
        completion = request.result()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        errors.append(float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return max(errors), count_fast_blocks(engine)


@pytest.mark.parametrize("layout", ["full", "ring", "paged"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_full_forward_pass(name: str, layout: str) -> None:
    config = ct.config("tiny-llama").model_dump()
    config["decoder"]["block"][0]["attention"] |= ATTENTIONS[name]
    model = build_randomized_model(ct.config(config))
    error, num_fast = max_logprob_error(model, cache_implementation=layout, prefill_chunk_size=16)
    assert num_fast == config["decoder"]["layers"]
    assert error <= 2e-5


@given(config=configs(("decoder",)))
def test_random_configurations_equal_full_forward_pass(config: Any) -> None:
    """Blocks that the kernels do not implement run as they are, between those that they do."""
    model = build_randomized_model(config)
    if model.has_lm_head:
        assert max_logprob_error(model)[0] <= 5e-5


def test_compile_false_runs_the_model_itself() -> None:
    engine = Engine(EngineConfig(ct.build("tiny-llama", seed=0), compile=False))
    assert count_fast_blocks(engine) == 0


def test_weights_that_move_in_memory() -> None:
    """Another engine may move the weights of the model to other memory."""
    model = ct.build("tiny-gpt", seed=0)
    engine = Engine(EngineConfig(model, max_num_seqs=1, max_model_len=40))
    params = SamplingParams(max_new_tokens=20)
    expected = engine.submit([1, 2, 3], params, seed=0)
    engine.run()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    garbage = [torch.full_like(parameter, 1e9) for parameter in model.parameters() for _ in range(3)]
    request = engine.submit([1, 2, 3], params, seed=0)
    engine.run()
    assert request.result().tokens == expected.result().tokens
    del garbage


@pytest.mark.parametrize(("bits", "max_error"), [(8, 0.05), (4, 1.0)])
def test_weight_bits_are_close_to_the_model(bits: int, max_error: float) -> None:
    config = ct.config("tiny-llama").model_dump()
    config |= {"d_model": 64}
    model = build_randomized_model(ct.config(config))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    error, num_fast = max_logprob_error(model, weight_bits=bits)
    assert num_fast == config["decoder"]["layers"]
    assert 0 < error <= max_error
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_packed_model_generates_like_the_dequantized_one(name: str) -> None:
    config = ct.config("tiny-llama").model_dump()
    config |= {"d_model": 64}
    config["decoder"]["block"][0]["ffn"]["hidden"] = 96
    plain = build_randomized_model(ct.config(config))
    packed = build_randomized_model(ct.config(config))
    for module, other in zip(plain.modules(), packed.modules(), strict=True):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and module.weight.shape[1] % 32 == 0:
            weight = quantize_blocks(torch.randn(module.weight.shape), BLOCK_FORMATS[name])
            module.weight.data = weight.dequantize() * 0.1
            blocks = weight.blocks
            scaled = gguf.quants.quantize(module.weight.data.numpy(), getattr(gguf.GGMLQuantizationType, name))
            blocks = torch.from_numpy(scaled)
            other.weight = torch.nn.Parameter(QuantizedTensor(blocks, weight.format), requires_grad=False)
            module.weight.data = other.weight.dequantize()
    error, num_fast = max_logprob_error(packed)
    assert num_fast == config["decoder"]["layers"]
    assert error <= 1e-3
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.allclose(packed(tokens), plain(tokens), atol=1e-3)
