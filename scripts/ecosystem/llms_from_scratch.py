"""The package of the book "Build a Large Language Model (From Scratch)": GPT-2, Llama 3 and Qwen3."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

NAME = "llms-from-scratch"
HOMEPAGE = "https://github.com/rasbt/LLMs-from-scratch"
REQUIREMENTS = ("llms-from-scratch==1.0.19",)
LENGTH, VOCAB = 96, 64
SIZES = {"vocab_size": VOCAB, "context_length": LENGTH, "emb_dim": 32, "n_heads": 4, "n_layers": 2}
GPT = {**SIZES, "drop_rate": 0.1, "qkv_bias": False}
LLAMA = {**SIZES, "hidden_dim": 64, "n_kv_groups": 2, "rope_base": 10_000.0, "dtype": torch.float32, "rope_freq": None}
SCALED = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 32}
QWEN = {**LLAMA, "head_dim": 16, "qk_norm": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "GPT-2", partial(make, "ch04", "GPTModel", GPT)
    yield "GPT-2, qkv bias", partial(make, "ch04", "GPTModel", GPT | {"qkv_bias": True})
    yield "GPT-2, scaled_dot_product_attention", partial(make, "ch04", "GPTModelFast", GPT)
    yield "GPT-2, KV cache", partial(make, "kv_cache.gpt2", "GPTModel", GPT)
    yield "GPT-2, KV cache, generate", partial(make, "kv_cache.gpt2", "GPTModel", GPT, only_generate=True)
    for cache, module in (("", "llama3"), (", KV cache", "kv_cache.llama3")):
        yield f"Llama-3{cache}", partial(make, module, "Llama3Model", LLAMA)
        yield f"Llama-3, RoPE scaling{cache}", partial(make, module, "Llama3Model", LLAMA | {"rope_freq": SCALED})
    yield "Llama-3, scaled_dot_product_attention", partial(make, "llama3", "Llama3ModelFast", LLAMA)
    for cache, module in (("", "qwen3"), (", KV cache", "kv_cache.qwen3")):
        yield f"Qwen3{cache}", partial(make, module, "Qwen3Model", QWEN)
        yield f"Qwen3 MoE{cache}", partial(make, module, "Qwen3Model", QWEN | EXPERTS)
    yield "Qwen3, KV cache for batches", partial(make, "kv_cache_batched.qwen3", "Qwen3Model", QWEN)


def make(module_name: str, class_name: str, config: dict[str, Any], only_generate: bool = False) -> Any:
    model_class = getattr(import_module(f"llms_from_scratch.{module_name}"), class_name)

    def build() -> nn.Module:
        model = model_class(config)
        for module in model.modules():  # experts are on the meta device until weights are loaded
            if isinstance(module, nn.Linear) and module.weight.is_meta:
                module.to_empty(device="cpu").reset_parameters()
        return model.eval()

    model = build()
    package = module_name.rpartition(".")[0]
    arguments = {
        "build_module": build,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": config.get("n_kv_groups"),
        "relative_positions": "n_kv_groups" in config,
        "trained": False,
        "generate": partial(generate, model, package),
    }
    if package:
        arguments["logits_with_cache"] = partial(logits_with_cache, model, package)
    if package == "kv_cache" and class_name == "GPTModel" and not only_generate:
        del arguments["generate"]
    return model, arguments | ({"only": ["generation"]} if only_generate else {})


def generate(model: nn.Module, package: str, tokens: Tensor, count: int) -> Tensor:
    """Greedy decoding with the function of the same part of the package."""
    if package:
        generate_tokens = import_module(f"llms_from_scratch.{package}.generate").generate_text_simple
        return generate_tokens(model, tokens, count)[:, tokens.shape[1] :]
    generate_tokens = import_module("llms_from_scratch.ch04").generate_text_simple
    return generate_tokens(model, tokens, count, context_size=LENGTH)[:, tokens.shape[1] :]


def logits_with_cache(model: nn.Module, package: str, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    cache_class = import_module(f"llms_from_scratch.{package}.utils").KVCache
    if package == "kv_cache_batched":
        if cache is None:
            cache = cache_class(n_layers=2, batch_size=len(tokens))
            model.reset_kv_cache(batch_size=len(tokens))
        logits = model(tokens, cache=cache, start_pos=model.current_pos.clone())
        model.current_pos += tokens.shape[1]
        return logits, cache
    if cache is None:
        cache = cache_class(n_layers=2)
        model.current_pos = 0
    options = {"use_cache": True} if type(model).__name__ == "GPTModel" else {}
    return model(tokens, cache=cache, **options), cache
