"""Claims about autoregressive generation and the KV cache."""

from collections.abc import Callable

import pytest
import torch
from support.config_strategies import build_randomized_model, random_tokens
from torch import Tensor

import cutaway as ct
from cutaway.model import Transformer


def build_decoder(name: str = "tiny-llama") -> tuple[Transformer, Tensor]:
    """A decoder in fp64 with random weights, and ten tokens."""
    config = ct.config(name)
    return build_randomized_model(config, torch.float64), random_tokens(config, 1, 10, 0)


def decode_cached(model: Transformer, tokens: Tensor) -> None:
    """Run the model on one token after another with a KV cache."""
    cache = model.new_cache(1, tokens.shape[1])
    for i in range(tokens.shape[1]):
        model(tokens[:, i : i + 1], cache=cache)


def decode_uncached(model: Transformer, tokens: Tensor) -> None:
    """Run the model on each prefix."""
    for i in range(tokens.shape[1]):
        model(tokens[:, : i + 1])


@torch.no_grad()
def test_c195_generation_appends_the_output_and_runs_again() -> None:
    """ct.generate equals the loop; each token is one more forward pass."""
    model, tokens = build_decoder()
    expected, num_calls = tokens, 0
    for _ in range(6):
        expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    model.decoder.blocks[0].register_forward_hook(count)
    (completion,) = ct.generate(model, tokens[0].tolist(), max_new_tokens=6, compile=False)
    assert completion.tokens == expected[0, 10:].tolist()
    assert num_calls == 6  # one pass per new token; the first one is the prefill of the prompt


@torch.no_grad()
def test_c196_each_new_token_passes_all_layers() -> None:
    model, tokens = build_decoder()
    layers: list[int] = []
    for index, block in enumerate(model.decoder.blocks):
        block.register_forward_hook(lambda module, args, out, index=index: layers.append(index))
    decode_cached(model, tokens)
    assert layers == list(range(4)) * 10


@torch.no_grad()
def test_c197_earlier_keys_and_values_do_not_change_if_attention_is_causal() -> None:
    changes = {}
    for name in ("tiny-llama", "tiny-bert"):
        model, tokens = build_decoder(name)
        with ct.trace(model, "attn.k", "attn.v") as t:
            model(tokens[:, :9])
            model(tokens)
        changes[name] = max(float((t[site, 0] - t[site, 1][:, :9]).abs().max()) for site in t if ".0." not in site)
    assert changes["tiny-llama"] < 1e-12
    assert changes["tiny-bert"] > 0.1


@pytest.mark.parametrize(("name", "kv_heads"), [("tiny-gpt", 4), ("tiny-llama", 2)])
def test_c198_number_of_cache_elements(name: str, kv_heads: int) -> None:
    """2·L·H·d_head·n with the number of KV heads for H: all 4 heads in MHA, 2 of 4 in GQA."""
    model, _ = build_decoder(name)
    layers, d_head = len(model.decoder.blocks), model.config.d_model // 4
    for n in (1, 7, 14):
        cache = model.new_cache(1, n)
        assert sum(x.k.numel() + x.v.numel() for x in cache.layers) == 2 * layers * kv_heads * d_head * n


def test_c199_cache_bytes_per_token() -> None:
    llama_2, llama_3 = (ct.size(name).kv_cache.bytes_per_token for name in ("llama-2-7b", "llama-3-8b"))
    assert (llama_2, llama_3) == (524_288, 131_072)
    assert llama_2 == 2 * 32 * 32 * 128 * 2 == 4 * llama_3


@torch.no_grad()
def test_c200_cache_reduces_token_passes_to_n_and_attention_work_to_n_squared() -> None:
    """Without a cache, n tokens need n(n+1)/2 token passes and n(n+1)(2n+1)/6 scores; with it, n and n(n+1)/2."""
    model, tokens = build_decoder()
    model.use_kernel("explicit")
    n, attention = 10, model.decoder.blocks[0].attn.f
    counts = {"tokens": 0, "scores": 0}

    def count_tokens(module: object, args: object, out: Tensor) -> None:
        counts["tokens"] += out.shape[1]

    def count_scores(module: object, args: object, out: Tensor) -> None:
        counts["scores"] += out[0, 0].numel()  # of one head

    attention.k.register_forward_hook(count_tokens)
    attention.kernel.softmax.register_forward_hook(count_scores)
    results: list[dict[str, int]] = []
    decode: Callable[[Transformer, Tensor], None]
    for decode in (decode_cached, decode_uncached):
        counts.update(tokens=0, scores=0)
        decode(model, tokens)
        results.append(dict(counts))
    assert results[0] == {"tokens": n, "scores": n * (n + 1) // 2}
    assert results[1] == {"tokens": n * (n + 1) // 2, "scores": n * (n + 1) * (2 * n + 1) // 6}


def test_c204_weights_dominate_decode_reads_until_the_context_or_the_batch_is_large() -> None:
    """Bytes of the cache equal those of the bf16 weights at 25,705 tokens in Llama-2 7B, 122,532 in Llama-3 8B."""
    equal_at = {}
    for name in ("llama-2-7b", "llama-3-8b"):
        size = ct.size(name, context=1024)
        equal_at[name] = size.checkpoint.total_bytes / size.kv_cache.bytes_per_token
        assert size.kv_cache.total_bytes < 0.05 * size.checkpoint.total_bytes  # batch 1, 1,024 tokens
    assert equal_at == pytest.approx({"llama-2-7b": 25_705, "llama-3-8b": 122_532}, abs=1)
    batched = ct.size("llama-2-7b", context=1024, batch_size=32)
    assert batched.kv_cache.total_bytes > batched.checkpoint.total_bytes
