"""GPU decode: Triton kernels equal the equations, fast steps equal the model, CUDA graphs are captured once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.generation import dequantize

import cutaway as ct
from cutaway.generate import Completion, Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

MODELS = ["tiny-gpt", "tiny-llama", "tiny-gemma", "tiny-moe", "tiny-mla", "tiny-t5", "tiny-bart"]
MAX_ERROR = {torch.float32: 2e-5, torch.bfloat16: 0.05}


def weight(rows: int, width: int, dtype: torch.dtype) -> Any:
    from cutaway.generate.fast.quantized_weights import LinearWeight

    values = torch.randn(rows, width, device="cuda", dtype=dtype) * width**-0.5
    return LinearWeight(values, torch.randn(rows, device="cuda", dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 33, 64])
@pytest.mark.parametrize(("count", "width"), [(96, 64), (200, 100), (512, 1000), (1024, 2048)])
def test_fused_linear_equals_equations(dtype: torch.dtype, rows: int, count: int, width: int) -> None:
    """Fused norm, product, bias, activation, gate and residual against the equations in fp32."""
    from cutaway.generate.fast.gpu_linear import NormParams, fused_add_norm, fused_linear, split_k_linear

    torch.manual_seed(0)
    x, w = torch.randn(rows, width, device="cuda", dtype=dtype), weight(2 * count, width, dtype)
    gain = torch.randn(width, device="cuda", dtype=dtype)
    shift = torch.randn(width, device="cuda", dtype=dtype)
    within = 1e-5 if dtype == torch.float32 else 0.03
    for norm in (
        None,
        NormParams(gain, None, 1e-5, False),
        NormParams(gain, None, 1e-5, False, True),
        NormParams(gain, shift, 1e-5, True),
    ):
        h = x.float()
        if norm is not None:
            h = F.layer_norm(h, (width,), eps=norm.eps) if norm.centered else F.rms_norm(h, (width,), eps=norm.eps)
            h = h * (gain.float() + norm.unit_offset) + (0 if norm.bias is None else shift.float())
        y = h @ w.values.float().T + w.bias.float()
        assert_near(fused_linear(x, w, norm=norm, act="gelu_tanh"), F.gelu(y, approximate="tanh"), within)
        gate, up = y.chunk(2, -1)
        assert_near(fused_linear(x, w, norm=norm, act="silu", gated=True), F.silu(gate) * up, within)
    plain = x.float() @ w.values.float().T + w.bias.float()
    assert_near(split_k_linear(x, w).sum(0), plain, within)
    stream = torch.randn(rows, 2 * count, device="cuda", dtype=dtype)
    total, _ = fused_add_norm(stream, split_k_linear(x, w), None)
    assert_near(total, stream.float() + plain, within)
    if rows == 1:
        assert_near(fused_linear(x, w, residual=stream), stream.float() + plain, within)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3, 32])
@pytest.mark.parametrize(("count", "width"), [(96, 128), (512, 1024), (1024, 2048)])
def test_packed_products_equal_dequantized(bits: int, rows: int, count: int, width: int) -> None:
    """A product with packed weights equals one with the dequantized weights, in all activation layouts."""
    from cutaway.generate.fast.gpu_linear import fused_linear, split_k_linear
    from cutaway.generate.fast.quantized_weights import pack_weight

    torch.manual_seed(0)
    x, w = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16), weight(2 * count, width, torch.bfloat16)
    small = pack_weight(w, bits)
    assert small.values.nbytes < w.values.nbytes * (0.6 if bits == 8 else 0.4)
    steps = w.values.float().abs().amax() / (127 if bits == 8 else 7)
    assert (dequantize(small) - w.values.float()).abs().max() <= 0.6 * steps
    y = x.float() @ dequantize(small).T + w.bias.float()
    if rows > 1:
        assert_near(split_k_linear(x, small).sum(0), y, 0.02)
    assert_near(fused_linear(x, small, dtype=torch.float32), y, 0.02)
    gate, up = y.chunk(2, -1)
    after = fused_linear(x, small, act="silu", gated=True, next_weight=small)
    assert_near(as_rows(after), F.silu(gate) * up, 0.03)
    last = pack_weight(weight(64, count, torch.bfloat16), 8)
    both = fused_linear(fused_linear(x, small, act="silu", gated=True, next_weight=last), last, dtype=torch.float32)
    assert_near(both, (F.silu(gate) * up) @ dequantize(last).T + last.bias.float(), 0.03)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Convert an activation in a packed layout to (rows, width)."""
    if x.dtype != torch.int32:
        return x.permute(1, 2, 0).flatten(1)
    high, low, scale = x[0], x[1], x[2].view(torch.float32)
    fixed = high.view(torch.int8).float() * 256 + low.view(torch.uint8).float()
    return fixed * scale.repeat_interleave(4, -1)


def test_fixed_point_propagates_nonfinite_values() -> None:
    from cutaway.generate.fast.gpu_linear import fused_linear
    from cutaway.generate.fast.quantized_weights import pack_weight

    w = pack_weight(weight(64, 128, torch.bfloat16), 8)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(1, 128, device="cuda", dtype=torch.bfloat16)
        x[0, 5] = bad
        assert not fused_linear(x, w).isfinite().any()


def assert_near(y: torch.Tensor, reference: torch.Tensor, within: float) -> None:
    assert (y.float() - reference).abs().max() <= within * max(1.0, float(reference.abs().max()))


def full_pass_logprobs(model: Any, prompt: list[int], completion: Completion) -> torch.Tensor:
    tokens = torch.tensor([completion.tokens], device="cuda")
    if "encoder" in model.stacks:
        target = torch.cat((torch.zeros_like(tokens[:, :1]), tokens), 1)
        logits = model(torch.tensor([prompt], device="cuda"), target)[:, :-1]
    else:
        logits = model(torch.tensor([prompt + completion.tokens], device="cuda"))[:, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1))[0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full", "ring", "paged"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_completions_equal_full_forward_pass(name: str, kind: str, dtype: torch.dtype) -> None:
    """CUDA graphs and fast blocks, with requests joining and leaving, against one full forward pass."""
    model: Any = ct.build(name, device="cuda", dtype=dtype, seed=0)
    size = model.config.vocab_size
    engine_config = EngineConfig(
        model,
        compile=True,
        max_num_seqs=3,
        max_model_len=64,
        cache_implementation=kind,
        prefill_chunk_size=16,
        decoder_start_token_id=0,
        max_source_len=40,
    )
    engine = Engine(engine_config)
    prompts = [[(7 * i + 3 * j) % size for j in range(n)] for i, n in enumerate((1, 28, 5, 17, 3))]
    params = [SamplingParams(max_new_tokens=34 - 5 * i, temperature=float(i % 2), logprobs=0) for i in range(5)]
    requests = [engine.submit(p, s, seed=i) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        completion = request.result()
        assert len(completion.tokens) == request.sampling_params.max_new_tokens
        error = torch.tensor(completion.logprobs, device="cuda") - full_pass_logprobs(model, prompt, completion)
        assert error.abs().max() <= MAX_ERROR[dtype], (name, kind, error.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_int8_cache_and_packed_weights_are_close(dtype: torch.dtype) -> None:
    model: Any = ct.build("tiny-llama", device="cuda", dtype=dtype, seed=0)
    for options in ({"kv_cache_dtype": torch.int8}, {"weight_bits": 8}, {"weight_bits": 4}):
        engine = Engine(
            EngineConfig(model, compile=True, max_num_seqs=2, max_model_len=96, cache_implementation="paged", **options)
        )
        requests = [
            engine.submit([1, 2, 3 + i], SamplingParams(max_new_tokens=40, logprobs=0), seed=0) for i in range(3)
        ]
        engine.run()
        for i, request in enumerate(requests):
            completion = request.result()
            error = torch.tensor(completion.logprobs, device="cuda") - full_pass_logprobs(
                model, [1, 2, 3 + i], completion
            )
            assert error.abs().max() <= 0.3, options


def test_graphs_are_captured_once() -> None:
    """Repeated requests capture no new graphs and allocate no memory."""
    model: Any = ct.build("tiny-llama", device="cuda", dtype=torch.bfloat16, seed=0)
    engine = Engine(EngineConfig(model, compile=True, max_num_seqs=8, max_model_len=64, cache_implementation="paged"))

    def serve() -> None:
        for i in range(20):
            engine.submit([1 + i, 2, 3], SamplingParams(max_new_tokens=3 + i), seed=i)
        engine.run()

    serve()
    graphs: Any = engine.model_runner.cuda_graphs
    recorded = {key: id(step.graphs) for key, step in graphs.steps.items()}
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        serve()
    assert {key: id(step.graphs) for key, step in graphs.steps.items()} == recorded
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + 2**20


def test_model_weights_are_unchanged() -> None:
    """Enabling fast decode concatenates weights in memory and changes no value."""
    model: Any = ct.build("tiny-llama", device="cuda", dtype=torch.bfloat16, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = torch.cuda.memory_allocated()
    engine = Engine(EngineConfig(model, compile=True, max_num_seqs=1, max_model_len=32))
    engine.submit([1], SamplingParams(max_new_tokens=4), seed=0)
    engine.run()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    del engine
    weights = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    assert torch.cuda.memory_allocated() - held <= weights / 2
