"""CPU decode steps with C kernels equal the model, for random configurations, all cache layouts and packed weights."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from support.config_strategies import build_randomized_model, configs

import cutaway as ct
from cutaway.cpu_kernels.library import load_cpu_kernels
from cutaway.cpu_kernels.quantized_tensor import BLOCK_FORMATS, QuantizedTensor, quantize_blocks
from cutaway.generate import Engine, EngineConfig, SamplingParams
from cutaway.generate.fast.cpu_decode_block import CPUDecodeBlock

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


def quantize(shape: tuple[int, int], name: str, seed: int) -> QuantizedTensor:
    """Random weights in a block format. k-quants, which the gguf package does not write, are random bytes."""
    torch.manual_seed(seed)
    block_format = BLOCK_FORMATS[name]
    if name.endswith("_K"):
        blocks = torch.randint(0, 256, (shape[0], shape[1] // block_format.block_size, block_format.num_bytes))
        scale = torch.tensor([0.003, 0.002], dtype=torch.float16).view(torch.uint8).long()
        first = 208 if name == "Q6_K" else 0
        blocks[..., first : first + 2] = scale[:2]
        if name != "Q6_K":
            blocks[..., 2:4] = scale[2:]
        return QuantizedTensor(blocks.to(torch.uint8).flatten(1), block_format)
    packed = gguf.quants.quantize(torch.randn(shape).numpy(), getattr(gguf.GGMLQuantizationType, name))
    return QuantizedTensor(torch.from_numpy(packed), block_format)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_products_equal_those_with_dequantized_weights(name: str) -> None:
    weight, bias = quantize((70, 512), name, 0), torch.randn(70)
    values = gguf.quants.dequantize(weight.blocks.numpy(), getattr(gguf.GGMLQuantizationType, name))
    expected = torch.from_numpy(values.astype(np.float32))
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight + 1, expected + 1)
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([[3, 69]]), weight), expected[[3, 69]][None])
    for rows in (1, 2, 3, 4, 7, 8, 9, 16, 17, 100):
        x = torch.randn(rows, 512) * torch.randn(rows, 512).exp()
        reference = x.double() @ expected.double().T + bias
        error = torch.nn.functional.linear(x, weight, bias) - reference
        assert error.abs().max() <= 2e-4 * reference.abs().max(), rows


@pytest.mark.parametrize(
    ("name", "max_error"), [("Q8_0", 0.6 / 127), ("Q6_K", 1.5 / 31), ("Q4_1", 1.05 / 15), ("Q4_K", 1.3 / 15)]
)
def test_quantization_rounds_to_the_nearest(name: str, max_error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 768)
    weight[0] = 0
    error = (quantize_blocks(weight, BLOCK_FORMATS[name]).dequantize() - weight).abs().unflatten(-1, (-1, 32))
    assert (error.amax(-1) <= max_error * weight.unflatten(-1, (-1, 32)).abs().amax(-1)).all()
    assert error[0].max() == 0


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


def test_products_propagate_nonfinite_values() -> None:
    weight = quantize((32, 64), "Q4_0", 0)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(1, 64)
        x[0, 40] = bad
        assert not torch.nn.functional.linear(x, weight).isfinite().any()


def test_gradients_of_inputs() -> None:
    weight, x = quantize((32, 64), "Q8_0", 0), torch.randn(3, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.nn.functional.linear(x, weight).square().sum(), x)
    plain = weight.dequantize()
    (expected,) = torch.autograd.grad((x @ plain.T).square().sum(), x)
    assert (grad - expected).abs().max() <= 2e-4 * expected.abs().max()


def test_packed_weights_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="read-only"):
        quantize((32, 64), "Q8_0", 0).mul_(2)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_packed_model_generates_like_the_dequantized_one(name: str) -> None:
    config = ct.config("tiny-llama").model_dump()
    config |= {"d_model": 64}
    config["decoder"]["block"][0]["ffn"]["hidden"] = 96
    plain = build_randomized_model(ct.config(config))
    packed = build_randomized_model(ct.config(config))
    for index, (module, other) in enumerate(zip(plain.modules(), packed.modules(), strict=True)):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and module.weight.shape[1] % 32 == 0:
            weight = quantize(tuple(module.weight.shape), name, index)  # type: ignore[arg-type]
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
