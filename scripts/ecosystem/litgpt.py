"""litgpt: one GPT class for all architectures; the KV cache is set up with `set_kv_cache` and used with `input_pos`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

HOMEPAGE = "https://github.com/Lightning-AI/litgpt"
REQUIREMENTS = ("litgpt==0.5.13",)
LENGTH = 96
SIZES = {
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "intermediate_size": 64,
    "padded_vocab_size": 64,
    "block_size": LENGTH,
}
GROUPED = {"n_query_groups": 2}
WINDOW = {"sliding_window_size": 8, "sliding_window_indices": [1, 0]}
LLAMA3_ROPE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 32}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 32}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Pythia": ("pythia-14m", {}),
    "Llama-2": ("Llama-2-7b-hf", {}),
    "Llama-3.1, grouped heads, RoPE scaling": ("Llama-3.1-8B", {**GROUPED, "rope_adjustments": LLAMA3_ROPE}),
    "Llama, linear RoPE scaling": ("Llama-2-7b-hf", {"rope_condense_ratio": 4}),
    "Llama, YaRN": ("Llama-2-7b-hf", {"rope_adjustments": YARN}),
    "Gemma, one kv head": ("Gemma-2b", {"n_query_groups": 1, "head_size": 16}),
    "Gemma-2, no window": ("Gemma-2-2b", {**GROUPED, "head_size": 8, "sliding_window_size": None}),
    "Gemma-2, window": ("Gemma-2-2b", {**GROUPED, "head_size": 8, **WINDOW}),
    "Gemma-3, window": (
        "Gemma-3-1b-it",
        {"n_query_groups": 1, "head_size": 8, **WINDOW, "rope_indices": [1, 0]},
    ),
    "Mistral, window in all layers": (
        "Mistral-7B-v0.1",
        {**GROUPED, "sliding_window_size": 8, "sliding_window_indices": [1, 1]},
    ),
    "Phi-2, partial RoPE": ("phi-2", {"rotary_percentage": 0.5}),
    "Phi-3": ("Phi-3-mini-4k-instruct", {"sliding_window_size": None, "sliding_window_indices": None}),
    "Falcon, one kv head": ("falcon-7b", {"n_query_groups": 1}),
    "Falcon, grouped heads": ("falcon-40b", GROUPED),
    "Mixtral": ("Mixtral-8x7B-v0.1", {**GROUPED, "n_expert": 4, "sliding_window_size": None}),
    "Qwen2.5": ("Qwen2.5-0.5B", GROUPED),
    "Qwen3": ("Qwen3-0.6B", {**GROUPED, "head_size": 16}),
    "Qwen3 MoE": ("Qwen3-30B-A3B", {**GROUPED, "head_size": 16, **EXPERTS}),
    "OLMo": ("OLMo-1B-hf", {}),
    "OLMo-2": ("OLMo-2-1124-7B", {"n_query_groups": 4}),
    "StableLM": ("stablelm-3b-4e1t", {}),
    "Latent attention": (
        "Llama-2-7b-hf",
        {"latent_attention": LATENT, "rope_interleave": True, "head_size": 8, "norm_eps": 1e-6},
    ),
}


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, (base, changes) in ARCHITECTURES.items():
        yield name, partial(make, base, changes)
        if "sliding_window_indices" in changes and changes["sliding_window_size"]:
            yield f"{name}, prefill in chunks of the window", partial(make, base, changes, chunked=True)


def make(base: str, changes: dict[str, Any], chunked: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    from litgpt import GPT, Config
    from litgpt.generate.base import generate as generate_tokens

    config = Config.from_name(base, **SIZES, **changes)

    def build() -> nn.Module:
        return GPT(config).eval()

    model = build()
    cached_model = GPT(config).eval()
    cached_model.load_state_dict(model.state_dict())

    def logits_with_cache(tokens: Tensor, start: int | None) -> tuple[Tensor, int]:
        if start is None:
            cached_model.load_state_dict(model.state_dict())
            cached_model.clear_kv_cache()
            cached_model.set_kv_cache(batch_size=len(tokens), dtype=next(model.parameters()).dtype)
        begin = start or 0
        size = config.sliding_window_size if chunked else tokens.shape[1]
        chunks = [
            (part, begin + i * size + torch.arange(part.shape[1])) for i, part in enumerate(tokens.split(size, 1))
        ]
        return torch.cat([cached_model(*chunk) for chunk in chunks], dim=1), begin + tokens.shape[1]

    def generate(tokens: Tensor, count: int) -> Tensor:
        rows = []
        for row in tokens:
            cached_model.clear_kv_cache()
            cached_model.set_kv_cache(batch_size=1)
            length = len(row) + count
            rows.append(generate_tokens(cached_model, row, length, temperature=0.0, include_prompt=False).clone())
        return torch.stack(rows)

    def sample(logits: Tensor, count: int, **options: Any) -> Tensor:
        from litgpt.generate.base import sample as sample_token

        return torch.cat([sample_token(logits[None, None], **options) for _ in range(count)])

    windows = {config.sliding_window_size} if config.sliding_window_size else set()
    indices = (config.sliding_window_indices or [])[: config.n_layer]
    arguments = {
        "logits_with_cache": logits_with_cache,
        "generate": generate,
        "sample": sample,
        "build_module": build,
        "vocab_size": 64,
        "max_seq_len": LENGTH,
        "kv_heads": config.n_query_groups,
        "windows": tuple(windows),
        "window": config.sliding_window_size if windows and all(indices) else None,
        "attention_scale": (config.attention_scores_scalar or (16 if config.latent_attention else config.head_size))
        ** -0.5,
        "relative_positions": True,
        "trained": False,
    }
    if config.rope_adjustments == YARN:
        scaling = {"kind": "yarn", "factor": 4.0, "original_length": 32, "attention_factor": 1.0}
        arguments["rope"] = {"theta": float(config.rope_base), "scaling": scaling}
    return model, arguments
