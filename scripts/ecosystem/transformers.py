"""transformers: settings that few models of the families page have, and other caches and decoding methods."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HOMEPAGE = "https://github.com/huggingface/transformers"
REQUIREMENTS = ("transformers==5.23.0",)
LENGTH = 96
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": LENGTH,
    **SPECIAL,
}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """A RoPE scaling of a model that was trained with 32 positions."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


ORIGINAL = {"original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Falcon, ALiBi": ("falcon", {"alibi": True}),
    "Falcon, ALiBi, grouped heads": ("falcon", {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "MPT, alibi_bias_max 16": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": LENGTH}),
    "BLOOM": ("bloom", {"n_head": 4, "n_layer": 2}),
    "GPT-2, scores divided by the layer": (
        "gpt2",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "scale_attn_by_inverse_layer_idx": True},
    ),
    "GPT-2, upcast attention": (
        "gpt2",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "reorder_and_upcast_attn": True},
    ),
    "GPT-BigCode, one kv head": ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH}),
    "OPT, post-norm, projected embeddings": (
        "opt",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 16, "ffn_dim": 64},
    ),
    "GPT-J": ("gptj", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "rotary_dim": 4}),
    "CodeGen": ("codegen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "rotary_dim": 4}),
    "Llama, linear RoPE scaling": ("llama", rope("linear", factor=3.0)),
    "Llama, dynamic RoPE scaling": ("llama", rope("dynamic", factor=3.0, **ORIGINAL)),
    "Llama, YaRN": ("llama", rope("yarn", factor=3.0, **ORIGINAL)),
    "Llama, Llama-3 RoPE scaling": (
        "llama",
        rope("llama3", factor=3.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
    ),
    "Llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "Phi-3, LongRoPE": (
        "phi3",
        {**rope("longrope", **LONG_FACTORS, factor=3.0, **ORIGINAL), **ORIGINAL, "sliding_window": None},
    ),
    "Phi-3, window": ("phi3", {"sliding_window": 8}),
    "Phi, qk norm": ("phi", {"qk_layernorm": True}),
    "GPT-NeoX, sequential residual": ("gpt_neox", {"use_parallel_residual": False}),
    "StableLM, qk norm, parallel residual": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "Mistral, window": ("mistral", {"sliding_window": 8}),
    "Mistral, window of one": ("mistral", {"sliding_window": 1}),
    "Mixtral, window": ("mixtral", {"sliding_window": 8, **EXPERTS}),
    "Qwen2, window in the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "Gemma-2, window": ("gemma2", {"head_dim": 8, **WINDOW}),
    "Gemma-3, window": ("gemma3_text", {"head_dim": 8, **WINDOW}),
    "Cohere2, window": ("cohere2", WINDOW),
    "GPT-OSS, sinks, window": ("gpt_oss", {"head_dim": 8, **WINDOW, **EXPERTS}),
    "OLMo-3, window": ("olmo3", WINDOW),
    "EXAONE-4, window": ("exaone4", WINDOW),
    "SmolLM3, layers without RoPE": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Llama-4, chunked attention": (
        "llama4_text",
        {
            "head_dim": 8,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 64,
            **EXPERTS,
        },
    ),
    "GLM-4, partial interleaved RoPE": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "Granite, multipliers": (
        "granite",
        {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "DeepSeek-V3, YaRN": (
        "deepseek_v3",
        {
            **rope("yarn", factor=3.0, mscale=1.0, mscale_all_dim=0.5, **ORIGINAL),
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "LFM2, convolutions": ("lfm2", {"full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]}),
    "BERT as a decoder": ("bert", {"is_decoder": True}),
    "RoBERTa as a decoder": ("roberta", {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": LENGTH + 2}),
    "XGLM": ("xglm", {"d_model": 32, "attention_heads": 4, "num_layers": 2, "ffn_dim": 64, "pad_token_id": 1}),
    "BioGPT": ("biogpt", {"pad_token_id": 1}),
    "Bart decoder": (
        "bart",
        {"d_model": 32, "decoder_attention_heads": 4, "decoder_layers": 2, "decoder_ffn_dim": 64, "is_decoder": True},
    ),
}
EAGER_ONLY = ("mpt", "bloom", "gptj", "codegen", "gpt_oss", "gemma2", "xglm")
STATIC_CACHE = (
    "Llama, YaRN",
    "Falcon, ALiBi",
    "Mistral, window",
    "Qwen2, window in the last layer",
    "Gemma-2, window",
    "Gemma-3, window",
    "GPT-OSS, sinks, window",
    "Cohere2, window",
    "Phi-3, LongRoPE",
    "Llama-4, chunked attention",
)


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in MODELS:
        for kernel in ("eager",) if MODELS[name][0] in EAGER_ONLY else ("eager", "sdpa"):
            yield f"{name} ({kernel})", partial(make, name, kernel)
    for name in STATIC_CACHE:
        yield (
            f"{name}, static cache",
            partial(make, name, "eager" if MODELS[name][0] in EAGER_ONLY else "sdpa", static=True),
        )
    for name in ("Llama, YaRN", "Gemma-2, window", "LFM2, convolutions", "Llama-4, chunked attention"):
        yield f"{name}, assisted generation", partial(make_assisted, name)


def build_model(name: str, kernel: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    model_type, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **SIZES | changes)
    if model_type == "mpt":
        config.attn_config.alibi_bias_max = 16
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()


def make(name: str, kernel: str, static: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    model = build_model(name, kernel)
    arguments: dict[str, Any] = {"max_seq_len": LENGTH}
    if static:
        arguments |= {
            "logits_with_cache": partial(logits_with_static_cache, model),
            "generate": partial(generate, model, cache_implementation="static", disable_compile=True),
        }
    return model, arguments


def logits_with_static_cache(model: nn.Module, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if cache is None else cache
    return model(tokens, past_key_values=cache, use_cache=True).logits, cache


def generate(model: nn.Module, tokens: Tensor, count: int, **options: Any) -> Tensor:
    output = model.generate(tokens, do_sample=False, max_new_tokens=count, min_new_tokens=count, **options)
    return output[:, tokens.shape[1] :]


def make_assisted(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Greedy assisted generation, with a draft model of other random weights."""
    model = build_model(name, "eager")
    torch.manual_seed(1)
    draft = build_model("Llama, biases", "sdpa")

    def generate_speculative(tokens: Tensor, count: int) -> Tensor:
        rows = [generate(model, row[None], count, assistant_model=draft) for row in tokens]
        return torch.cat(rows)

    only = ["speculative-decoding", "generation", "beam-search"]
    return model, {"generate_speculative": generate_speculative, "max_seq_len": LENGTH, "only": only}
