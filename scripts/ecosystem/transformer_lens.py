"""TransformerLens: HookedTransformer with `past_kv_cache`, masks of padding, and functions that simplify weights."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAME = "TransformerLens"
HOMEPAGE = "https://github.com/TransformerLensOrg/TransformerLens"
REQUIREMENTS = ("transformer-lens==3.9.0", "transformers==5.23.0")
LENGTH, VOCAB = 96, 64
SIZES = {
    "n_layers": 2,
    "d_model": 32,
    "n_ctx": LENGTH,
    "d_head": 8,
    "n_heads": 4,
    "d_mlp": 64,
    "d_vocab": VOCAB,
    "act_fn": "gelu",
    "device": "cpu",
}
ROTARY = {"positional_embedding_type": "rotary"}
GROUPED = {"n_key_value_heads": 2}
LLAMA = {**ROTARY, "normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"}
WINDOW = {"use_local_attn": True, "window_size": 8}
SOFTCAPS = {"attn_scores_soft_cap": 5.0, "output_logits_soft_cap": 3.0}
LLAMA3_ROPE = {
    "use_NTK_by_parts_rope": True,
    "NTK_by_parts_factor": 4.0,
    "NTK_original_ctx_len": 32,
}
YARN = {"use_yarn_rope": True, "yarn_factor": 4.0, "yarn_original_max_position_embeddings": 32}
QWEN1 = {"use_dynamic_ntk_rope": True, "use_logn_attn": True, "train_seq_length": 24}
MODELS: dict[str, dict[str, Any]] = {
    "learned positions, LayerNorm": {},
    "attention only": {"attn_only": True},
    "no normalization": {"normalization_type": None},
    "LayerNorm before and after": {"normalization_type": "LN", "use_normalization_before_and_after": True},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "ALiBi": {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "ALiBi, six heads": {"positional_embedding_type": "alibi", "n_heads": 6},
    "scores divided by the layer": {"scale_attn_by_inverse_layer_idx": True},
    "window in one layer": {**WINDOW, "attn_types": ["local", "global"]},
    "GPT-J: partial RoPE of adjacent pairs, parallel": {
        **ROTARY,
        "rotary_dim": 4,
        "rotary_adjacent_pairs": True,
        "parallel_attn_mlp": True,
    },
    "GPT-NeoX: partial RoPE, parallel": {**ROTARY, "rotary_dim": 4, "parallel_attn_mlp": True},
    "Llama": LLAMA,
    "Llama, grouped heads, split inputs": {**LLAMA, **GROUPED, "use_split_qkv_input": True},
    "Llama, grouped heads, ungrouped": {**LLAMA, **GROUPED, "ungroup_grouped_query_attention": True},
    "Llama-3.1, grouped heads": {**LLAMA, **GROUPED, **LLAMA3_ROPE},
    "Llama, YaRN": {**LLAMA, **YARN},
    "Mistral, window in all layers": {**LLAMA, **GROUPED, **WINDOW, "attn_types": ["local", "local"]},
    "Qwen: dynamic RoPE scaling, scores scaled by log n": {**LLAMA, **QWEN1},
    "Qwen3: query and key norm": {**LLAMA, **GROUPED, "use_qk_norm": True},
    "Mixtral": {**LLAMA, **GROUPED, "num_experts": 4, "experts_per_token": 2, "norm_topk_prob": True},
    "Gemma-2: softcapping, window, norms before and after": {
        **LLAMA,
        **GROUPED,
        **WINDOW,
        **SOFTCAPS,
        "attn_types": ["local", "global"],
        "use_normalization_before_and_after": True,
    },
    "Gemma-3: window with another RoPE base": {
        **LLAMA,
        **GROUPED,
        **WINDOW,
        "attn_types": ["local", "global"],
        "rotary_base": 1_000_000,
        "rotary_base_local": 10_000,
        "rotary_scaling_factor": 4.0,
        "use_qk_norm": True,
        "use_normalization_before_and_after": True,
    },
    "GPT-OSS: attention sinks, window, YaRN": {
        **LLAMA,
        **GROUPED,
        **WINDOW,
        **YARN,
        "attn_types": ["local", "global"],
        "use_attention_sinks": True,
    },
    "OLMo: clipped queries, keys and values": {**LLAMA, "clip_qkv": 0.5},
}
PROCESSED = (
    "learned positions, LayerNorm",
    "attention only",
    "shortformer",
    "ALiBi",
    "GPT-NeoX: partial RoPE, parallel",
    "Llama",
    "Llama-3.1, grouped heads",
    "Qwen3: query and key norm",
    "Mixtral",
    "Gemma-2: softcapping, window, norms before and after",
    "GPT-OSS: attention sinks, window, YaRN",
    "OLMo: clipped queries, keys and values",
)


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, changes in MODELS.items():
        yield name, partial(make, changes)
    for name in PROCESSED:
        yield f"{name}, processed weights", partial(make_processed, MODELS[name])
    for name in ("learned positions, LayerNorm", "ALiBi", "scores divided by the layer"):
        yield f"{name}, factored attention matrices", partial(make_processed, MODELS[name], factored=True)


def build(changes: dict[str, Any]) -> nn.Module:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(**SIZES | changes)
    return HookedTransformer(config).eval()


def make(changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
    from transformer_lens.utilities import sample_logits

    model = build(changes)
    if model.cfg.use_attention_sinks:
        for block in model.blocks:
            block.attn.sinks.data.normal_()

    def start_cache(batch_size: int) -> Any:
        model.cfg.dtype = next(model.parameters()).dtype
        return TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", batch_size)

    def logits_with_cache(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = cache or start_cache(len(tokens))
        return model(tokens, past_kv_cache=cache, attention_mask=torch.ones_like(tokens)), cache

    def logits_with_padded_cache(tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = cache or start_cache(len(tokens))
        return model(tokens, past_kv_cache=cache, attention_mask=mask[:, -tokens.shape[1] :].long()), cache

    def generate(tokens: Tensor, count: int) -> Tensor:
        options = {"stop_at_eos": False, "do_sample": False, "return_type": "tokens", "verbose": False}
        return model.generate(tokens, count, **options)[:, tokens.shape[1] :]

    def sample(logits: Tensor, count: int, **options: Any) -> Tensor:
        return sample_logits(logits.expand(count, -1).clone(), **options)

    config = model.cfg
    windows = {config.window_size} if config.use_local_attn else set()
    arguments = {
        "logits": model.__call__,
        "logits_with_mask": lambda tokens, mask: model(tokens, attention_mask=mask.long()),
        "logits_with_cache": logits_with_cache,
        "logits_with_padded_cache": logits_with_padded_cache,
        "generate": generate,
        "sample": sample,
        "build_module": partial(build, changes),
        "positions_skip_padding": True,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "kv_heads": config.n_key_value_heads or config.n_heads,
        "windows": tuple(windows),
        "window": config.window_size if windows and "global" not in config.attn_types else None,
        "relative_positions": config.positional_embedding_type in ("rotary", "alibi"),
        "trained": False,
    }
    return model, arguments


def make_processed(changes: dict[str, Any], factored: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose weights were simplified, compared with itself before; center_unembed keeps log-probabilities."""
    reference, model = build(changes), build(changes)
    for parameter in reference.parameters():  # also biases, norm weights and sinks
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.load_state_dict(reference.state_dict())
    model.process_weights_(refactor_factored_attn_matrices=factored)
    return model, {
        "logits": lambda tokens: model(tokens).log_softmax(-1),
        "reference_logits": lambda tokens: reference(tokens).log_softmax(-1),
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "only": ["parity", "causality", "batch-isolation"],
    }
