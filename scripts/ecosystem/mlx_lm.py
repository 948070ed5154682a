"""mlx-lm: models of transformers on MLX (CPU), loaded with `load_model` from a random checkpoint of transformers.

Caches of the layers (`make_prompt_cache`), prefill in steps (`generate_step`) and batches (`batch_generate`).
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NAME = "mlx-lm"
HOMEPAGE = "https://github.com/ml-explore/mlx-lm"
REQUIREMENTS = ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4", "transformers==5.23.0")
LENGTH, VOCAB, THETA = 96, 64, 10_000.0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ORIGINAL = {"original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, **ORIGINAL}
LONG_ORIGINAL = {"original_max_position_embeddings": 4096}  # at least one pair is between the two limits
SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]
LONGROPE = {"type": "longrope", "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
NEOX = {"rotary_pct": 0.5, "rotary_emb_base": 10_000, "intermediate_size": 128}
MSCALE = {"type": "yarn", "mscale": 0.707, "mscale_all_dim": 0.707}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **EXPERTS,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, linear RoPE scaling": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "Llama, Llama-3 RoPE scaling": ("llama", {"rope_scaling": LLAMA3}),
    "Llama, YaRN": ("llama", {"rope_scaling": YARN}),
    "Llama, YaRN, truncate=false": ("llama", {"rope_scaling": {**YARN, **LONG_ORIGINAL, "truncate": False}}),
    "Mistral, window": ("mistral", {"sliding_window": 8}),
    "Ministral": ("ministral3", {"sliding_window": None}),
    "Mixtral": ("mixtral", {**EXPERTS, "sliding_window": None}),
    "Mixtral, window": ("mixtral", {**EXPERTS, "sliding_window": 8}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2, window in the last layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "Qwen2-MoE": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Qwen3-MoE": ("qwen3_moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "Gemma": ("gemma", {"head_dim": 8}),
    "Gemma-2, window longer than the text": (
        "gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 16, **WINDOW, "sliding_window": LENGTH},
    ),
    "Gemma-2, window": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 16, **WINDOW}),
    "Gemma-3, window": (
        "gemma3_text",
        {"head_dim": 8, "query_pre_attn_scalar": 16, **WINDOW, "sliding_window_pattern": 2},
    ),
    "Phi": ("phi", {"partial_rotary_factor": 0.5}),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "Phi-3, window": ("phi3", {"sliding_window": 8}),
    "Phi-3, LongRoPE": ("phi3", {"sliding_window": None, "rope_scaling": LONGROPE, **ORIGINAL}),
    "GPT-NeoX": ("gpt_neox", NEOX),
    "GPT-NeoX, sequential residual": ("gpt_neox", {**NEOX, "use_parallel_residual": False}),
    "StableLM, query and key norm, parallel residual": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    ),
    "Starcoder-2, window": ("starcoder2", {"sliding_window": 8}),
    "Cohere": ("cohere", {"logit_scale": 0.25}),
    "Cohere, query and key norm": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "Cohere-2, window": ("cohere2", {"head_dim": 8, "logit_scale": 0.25, **WINDOW, "sliding_window_pattern": 2}),
    "OLMo-2": ("olmo2", {}),
    "OLMo-3, window": ("olmo3", WINDOW),
    "OLMoE": ("olmoe", {**EXPERTS, "norm_topk_prob": False}),
    "Granite": (
        "granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 4.0},
    ),
    "GPT-OSS, window": ("gpt_oss", {"head_dim": 8, **WINDOW, **EXPERTS, "rope_scaling": YARN}),
    "GPT-OSS, window, YaRN with truncate=false": (
        "gpt_oss",
        {"head_dim": 8, **WINDOW, **EXPERTS, "rope_scaling": {**YARN, **LONG_ORIGINAL, "truncate": False}},
    ),
    "EXAONE-4, window": ("exaone4", {**WINDOW, "sliding_window_pattern": "LG", "head_dim": 8, "rope_scaling": None}),
    "GLM-4": ("glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "Nemotron": ("nemotron", {"partial_rotary_factor": 0.5}),
    "SmolLM-3, a layer without RoPE": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Helium": ("helium", {"head_dim": 8}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {**LATENT, "topk_method": "greedy", "scoring_func": "softmax", "rope_scaling": {**YARN, **MSCALE}},
    ),
    "DeepSeek-V3": ("deepseek_v3", {**LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "Mamba": ("mamba", {"state_size": 8, "conv_kernel": 4}),
}
SMALL_STEPS = ("Llama, Llama-3 RoPE scaling", "Gemma-3, window", "GPT-OSS, window")


def configurations() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, (family, changes) in MODELS.items():
        yield name, partial(make, family, changes)
        if name in SMALL_STEPS:
            yield f"{name}, prefill in steps of 3", partial(make, family, changes, prefill_step_size=3)
    yield "Llama, RotatingKVCache of 32 tokens", partial(make, "llama", {}, max_kv_size=32)


def convert(array: Any) -> Tensor:
    import mlx.core as mx
    import numpy as np

    return torch.from_numpy(np.array(array.astype(mx.float32)))


def make_hub_fields(saved: dict[str, Any]) -> dict[str, Any]:
    """The RoPE fields of configs on the hub, which transformers 5 writes as `rope_parameters`."""
    parameters = saved.get("rope_parameters") or {}
    if "full_attention" in parameters:  # Gemma-3
        local, full = parameters["sliding_attention"], parameters["full_attention"]
        return {"rope_theta": full["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
    return {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}


def split_experts(path: Path) -> None:
    """Write the experts of GPT-OSS with the names of mlx-lm, whose loader expects quantized experts."""
    from safetensors.torch import load_file, save_file

    weights = {}
    for name, value in load_file(path).items():
        if name.endswith("gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gate, up = (value[..., i::2].transpose(-1, -2).contiguous() for i in (0, 1))
            weights |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("gate_up_proj_bias"):
            prefix = name.removesuffix("gate_up_proj_bias")
            gate, up = (value[..., i::2].contiguous() for i in (0, 1))
            weights |= {f"{prefix}gate_proj.bias": gate, f"{prefix}up_proj.bias": up}
        elif name.endswith("down_proj"):
            weights[f"{name}.weight"] = value.transpose(-1, -2).contiguous()
        else:
            weights[name.replace("down_proj_bias", "down_proj.bias")] = value
    save_file(weights, path, {"format": "pt"})


def make(
    family: str, changes: dict[str, Any], prefill_step_size: int = 2048, max_kv_size: int | None = None
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    import mlx.core as mx
    import transformers
    from mlx_lm.generate import batch_generate, generate_step
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    scaling = {"rope_theta": THETA, **changes["rope_scaling"]} if changes.get("rope_scaling") else None
    fields = SIZES | changes | ({"rope_parameters": scaling} if scaling else {})
    config = transformers.AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "rope_scaling"})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in reference.named_parameters():  # also biases, and initial weights that are too small
        if parameter.dim() < 2 and "norm" not in name and "A_log" not in name and family != "mamba":
            parameter.data.normal_(0, 0.1)
        elif parameter.dim() > 1 and family != "mamba":
            parameter.data.normal_(0, 0.15)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        path = Path(folder) / "config.json"  # with the fields of configs on the hub
        saved = json.loads(path.read_text())
        hub = make_hub_fields(saved)
        path.write_text(json.dumps(saved | hub | {k: v for k, v in changes.items() if k != "sliding_window_pattern"}))
        extra = {k: v for k, v in changes.items() if k == "sliding_window_pattern"}
        if family == "gpt_oss":
            split_experts(Path(folder) / "model.safetensors")
        model = load_model(Path(folder), model_config=extra)[0]

    def logits(tokens: Tensor) -> Tensor:
        return convert(model(mx.array(tokens.numpy())))

    def logits_with_cache(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        cache = cache or make_prompt_cache(model, max_kv_size)
        steps = tokens.split(prefill_step_size, dim=1)
        return torch.cat([convert(model(mx.array(step.numpy()), cache=cache)) for step in steps], dim=1), cache

    def generate(tokens: Tensor, count: int) -> Tensor:
        options = {"max_tokens": count, "prefill_step_size": prefill_step_size, "max_kv_size": max_kv_size}
        rows = [[token for token, _ in generate_step(mx.array(row.numpy()), model, **options)] for row in tokens]
        return torch.tensor(rows)

    def generate_padded(tokens: Tensor, mask: Tensor, count: int) -> Tensor:
        tokenizer = SimpleNamespace(eos_token_ids=[], decode=lambda ids: "")
        prompts = [row[kept].tolist() for row, kept in zip(tokens, mask, strict=True)]
        options = {"max_tokens": count, "return_token_ids": True, "prefill_step_size": prefill_step_size}
        return torch.tensor(batch_generate(model, tokenizer, prompts, **options).token_ids)

    def sample(scores: Tensor, count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 0.0) -> Tensor:
        sampler = make_sampler(temp=temperature, top_k=top_k, top_p=top_p)
        rows = mx.array(scores.log_softmax(-1).expand(count, -1).numpy())
        return convert(sampler(rows)).long()

    def reference_logits(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return reference(tokens, use_cache=False).logits

    arguments: dict[str, Any] = {
        "logits": logits,
        "logits_with_cache": logits_with_cache,
        "generate": generate,
        "generate_padded": generate_padded,
        "reference_logits": reference_logits,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
        "relative_positions": family != "mamba",
        "has_positions": True,
        "trained": True,
    }
    if family == "llama" and not changes:
        arguments["sample"] = sample
    if max_kv_size is not None:  # the cache is a sliding window for a model without one
        arguments = {key: arguments[key] for key in ("logits", "logits_with_cache", "generate")}
        arguments |= {"vocab_size": VOCAB, "max_seq_len": max_kv_size}
    return logits, arguments
