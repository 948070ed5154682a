"""Decode kernels of latent attention equal the layer; engines with and without them produce the same tokens."""

import copy
from typing import Any

import pytest
import torch
from support.config_strategies import build_randomized_model
from support.generation import dequantize

import cutaway as ct
from cutaway.generate import Engine, EngineConfig, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.unchecked]

MAX_LEN, WINDOW = 512, 9
YARN = {"kind": "yarn", "factor": 40.0, "original_length": 16, "attention_factor": 1.0}
ROUTER = {
    "score": "sigmoid",
    "dtype": "float32",
    "top_k": 3,
    "scale": 2.5,
    "selection_bias": True,
    "groups": {"num_groups": 3, "top_k": 2},
}
LAYERS: dict[str, dict[str, Any]] = {
    "query latent": {},
    "no query latent, half layout": {"q_rank": None, "position": {"kind": "rope", "layout": "half"}},
    "YaRN, scale of the scores": {
        "scale": 0.41,
        "position": {"kind": "rope", "layout": "interleaved", "scaling": YARN},
    },
    "widths that are not powers of two": {"heads": 3, "kv_rank": 48, "d_nope": 12, "d_rope": 6, "d_value": 20},
    "wide latent, many heads": {"heads": 20, "kv_rank": 160, "d_nope": 32, "d_rope": 32, "d_value": 32},
    "biases, unit offset": {"bias": True, "norm": {"kind": "rmsnorm", "unit_offset": True}},
    "sliding window": {"window": WINDOW},
}


def mla_config(attention: dict[str, Any], **ffn: Any) -> Any:
    """`tiny-mla` with other fields in its attention, and in the mixture of experts of its last block."""
    config = ct.config("tiny-mla").model_dump()
    for block in (*config["decoder"]["leading_blocks"], *config["decoder"]["block"]):
        block["attention"] |= attention
    config["decoder"]["block"][-1]["ffn"] |= ffn
    return ct.config(config)


def build_cache(model: Any, rows: int, kind: str) -> Any:
    """A cache with random contents and rows of different lengths."""
    from cutaway.generate.engine.kv_cache import BatchKVCache

    ring = model.stacks["decoder"].windows[0] is not None and kind == "full"
    cache = BatchKVCache(
        model,
        rows,
        MAX_LEN,
        implementation="ring" if ring else "full" if kind == "full" else "paged",
        chunk_size=4 if ring else None,
        dtype=torch.int8 if kind == "int8" else None,
    )
    for row in range(rows):
        pages = range(1 + row * MAX_LEN // max(1, cache.page_size), 1 + (row + 1) * MAX_LEN // max(1, cache.page_size))
        cache.assign_row(row, (67 * row + 170) % (MAX_LEN - 1), pages if cache.page_table is not None else ())
    for layer in cache.paged_layers:
        for buffer in (layer.keys, layer.values):
            shape = buffer.values.flatten(0, 1).shape
            slots = torch.arange(shape[0], device=model.device)
            buffer.write(slots, torch.randn(shape, device=model.device, dtype=model.dtype))
    cache.max_len = MAX_LEN - 1
    return cache


def layer_outputs(
    name: str, rows: int, kind: str, dtype: torch.dtype, device: str, bits: int | None = None
) -> list[torch.Tensor]:
    """Results of the kernels and of the layer for one new token per row: (y, expected y), and the same for what they
    write to the cache. With `bits`, the layer has the weights that the kernels dequantize."""
    from cutaway.generate.fast.gpu_decode_model import FastLatentAttention, build_gpu_decode_model
    from cutaway.generate.fast.gpu_linear import fused_linear

    torch.manual_seed(0)
    config = mla_config(LAYERS[name])
    if bits is not None:  # groups of 128 weights
        config = mla_config({**LAYERS[name], "heads": 4, "d_value": 32}).replace({"d_model": 128})
    model: Any = build_randomized_model(config, dtype).to(device)
    cache = build_cache(model, rows, kind)
    x = torch.randn(rows, 1, model.config.d_model, device=device, dtype=dtype)
    outputs = []
    for decode_model in (build_gpu_decode_model(model, bits), model):
        stack, layer_cache = decode_model.stacks["decoder"], copy.deepcopy(cache)
        positions, slot_mappings = layer_cache.assign_slots(1, None)
        context = stack.build_layer_contexts(positions, dtype, layer_cache, slot_mappings)[0]
        block = stack.blocks[0]
        if decode_model is model:
            if bits is not None:
                _quantize(block.attn.f, bits)
            y = block.attn.f(block.attn.norm_in(x), context)
        else:
            fast = block.fast_attention
            assert isinstance(fast, FastLatentAttention)
            z = fast.forward_before_out_proj(x[:, 0], fast.norm, context)
            y = fused_linear(z, fast.out_weight).unsqueeze(1)
        layer, slots = layer_cache.paged_layers[0], slot_mappings[layer_cache.layers[0].num_slots].slots
        outputs.append([y, *(_read(buffer, slots) for buffer in (layer.keys, layer.values))])
    return [tensor.float() for pair in zip(*outputs, strict=True) for tensor in pair]


def _quantize(attention: Any, bits: int) -> None:
    """Round the weights that the fast sublayer packs."""
    from cutaway.generate.fast.quantized_weights import LinearWeight, pack_weight

    q = [attention.q[0], attention.q[2]] if isinstance(attention.q, torch.nn.Sequential) else [attention.q]
    for linear in (*q, attention.kv_down, attention.o):
        packed = pack_weight(LinearWeight(linear.weight.data), bits)
        if packed.scale is not None:
            linear.weight.data = dequantize(packed).to(linear.weight.dtype)


def _read(buffer: Any, slots: torch.Tensor) -> torch.Tensor:
    """What a buffer holds in the given slots."""
    values = buffer.values.flatten(0, 1)[slots].float()
    return values if buffer.scale is None else values * buffer.scale.flatten(0, 1)[slots].float().unsqueeze(-1)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest error of each row, relative to the largest expected value or 1."""
    return (result - expected).abs().flatten(1).amax(1) / expected.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "kind"), [(1, "paged"), (1, "int8"), (2, "full"), (17, "int8"), (64, "paged")])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_fast_latent_attention_equals_layer(name: str, rows: int, kind: str, dtype: torch.dtype) -> None:
    outputs = layer_outputs(name, rows, kind, dtype, "cuda")
    errors = [relative_error(*outputs[i : i + 2]) for i in (0, 2, 4)]
    y_error, cache_error = errors[0], torch.maximum(*errors[1:])
    max_error = torch.full_like(y_error, 1e-4 if dtype == torch.float32 else 0.05)
    max_cache_error = max_error
    if kind == "int8" and dtype == torch.float32:
        # The kernel may round a value (one step is 1/127 of the largest) or a scale to the next number.
        max_cache_error = torch.full_like(max_error, 1.2 / 127)
        max_error = torch.where(cache_error == 0, max_error, 5e-3)
    assert (cache_error <= max_cache_error).all()
    assert (y_error <= max_error).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["query latent", "no query latent, half layout", "biases, unit offset"])
@torch.no_grad()
def test_packed_weights_equal_dequantized(name: str, rows: int, bits: int) -> None:
    y, expected, *_ = layer_outputs(name, rows, "paged", torch.bfloat16, "cuda", bits)
    assert (y - expected).abs().max() <= 0.05 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["query latent", "no query latent, half layout", "YaRN, scale of the scores"])
@torch.no_grad()
def test_greedy_tokens_equal_plain_decode(name: str, rows: int) -> None:
    """Engines with compile=True and compile=False, with the router of DeepSeek-V3."""
    model: Any = build_randomized_model(mla_config(LAYERS[name], experts=12, router=ROUTER)).cuda()
    prompts = [[5 + i, 7, 11 * i][: 1 + i % 3] for i in range(rows)]
    tokens = []
    for compiled in (True, False):
        engine = Engine(EngineConfig(model, compile=compiled, max_num_seqs=rows, max_model_len=96))
        requests = [engine.submit(prompt, SamplingParams(max_new_tokens=40), seed=0) for prompt in prompts]
        engine.run()
        tokens.append([request.result().tokens for request in requests])
        engine.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3"])
def test_presets_run_in_kernels(name: str) -> None:
    """All layers of the DeepSeek presets are fast; prefill without padding does not support latent attention."""
    from cutaway.generate.fast.gpu_decode_model import build_gpu_decode_model, can_pack_prefill

    layers = ct.config(name).decoder.layers
    model: Any = ct.build(ct.config(name).replace({"decoder.layers": 4}), device="meta")
    assert layers > 4
    blocks = build_gpu_decode_model(model).stacks["decoder"].blocks
    assert all(block.fast_attention is not None and block.fast_ffn is not None for block in blocks)
    assert not can_pack_prefill(model)
