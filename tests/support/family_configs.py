"""Random transformers configs of the families."""

from typing import Any

import torch
import transformers
from support.family_parity import PeerModel, rng

REQUIRED_KEYS = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 128},
}
"""Keys without which the default config of transformers is no valid model: experts, and an even rotary dimension."""

ROPE_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.3},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "longrope", "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False, "beta_fast": 20.0},
]
FEED_FORWARD_PROJS = ["relu", "gated-gelu", "gated-silu", "gelu", "gated-gelu", "relu", "gated-relu", "silu"]
SLIDING_WINDOW_SETTINGS: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "num_hidden_layers": 2},
    {"sliding_window": 4, "num_hidden_layers": 2},
    {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "max_window_layers": 0,
        "num_hidden_layers": 4,
    },
    {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1, "num_hidden_layers": 2},
    {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "num_hidden_layers": 3},
    {"use_sliding_window": False, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
]


def random_llama_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of the Llama-like families; eight consecutive seeds cover all RoPE scalings."""
    r = rng(seed)
    heads = r.choice([2, 3, 4, 6])
    kv_heads = r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    head_dim = r.choice([4, 8, 10])
    scaling = dict(ROPE_SCALINGS[seed % len(ROPE_SCALINGS)], rope_theta=r.choice([1e4, 5e5]))
    if scaling["rope_type"] == "longrope":
        scaling["short_factor"] = [round(r.uniform(1, 2), 2) for _ in range(head_dim // 2)]
        scaling["long_factor"] = [round(r.uniform(2, 6), 2) for _ in range(head_dim // 2)]
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "hidden_size": heads * r.choice([6, 8]),
        "intermediate_size": r.choice([24, 50]),
        "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 16 if scaling["rope_type"] == "dynamic" else 64,
        "rms_norm_eps": r.choice([1e-5, 1e-6]),
        "tie_word_embeddings": r.random() < 0.5,
        "rope_parameters": scaling,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
    } | overrides


def random_bert_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of the BERT-like families."""
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "hidden_size": heads * r.choice([5, 8] if heads > 1 else [15, 20]),
        "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": r.choice([24, 50]),
        "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu", "silu"][seed % 4],
        "layer_norm_eps": r.choice([1e-12, 1e-5, 1e-3]),
        "max_position_embeddings": r.choice([40, 44]),
        "type_vocab_size": r.choice([1, 2, 3]),
        "hidden_dropout_prob": r.choice([0.0, 0.1]),
        "attention_probs_dropout_prob": r.choice([0.0, 0.2]),
        "tie_word_embeddings": seed % 3 != 0,
        "pad_token_id": 0,
    } | overrides


def random_roberta_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """`random_bert_config` with several values of pad_token_id, which shifts the positions."""
    return random_bert_config(seed, pad_token_id=[1, 0, 3, 1][seed % 4], bos_token_id=0, eos_token_id=2, **overrides)


def roberta_peer(config: Any, auto_class: Any) -> PeerModel:
    """Peer of the RoBERTa-like families. An untied head of transformers has a second, unused bias."""
    unused = () if config.tie_word_embeddings else ("lm_head.bias",)
    return PeerModel(config, auto_class, long_seq_len=36, pass_position_ids=False, unused_parameters=unused)


def random_bart_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of the BART-like families; encoder and decoder differ wherever they can."""
    r = rng(seed)
    heads = r.choice([(1, 2), (2, 4), (3, 1), (4, 3)])
    encoder = r.choice([1, 2, 3])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "d_model": 12 * r.choice([2, 3]),
        "encoder_layers": encoder,
        "decoder_layers": r.choice([n for n in (1, 2, 3) if n <= encoder or seed > 5]),
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": r.choice([24, 50]),
        "decoder_ffn_dim": r.choice([24, 40]),
        "max_position_embeddings": 40,
        "activation_function": ["gelu", "relu", "silu", "gelu_pytorch_tanh"][seed % 4],
        "dropout": r.choice([0.0, 0.1]),
        "attention_dropout": r.choice([0.0, 0.1]),
        "activation_dropout": r.choice([0.0, 0.1]),
        "scale_embedding": r.random() < 0.5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    } | overrides


def bart_peer(config: Any) -> PeerModel:
    """Peer of the BART-like families: right padding only, since positions count from the start of the row."""
    deeper_decoder = config.decoder_layers > config.encoder_layers
    return PeerModel(
        config,
        transformers.AutoModelForSeq2SeqLM,
        long_seq_len=40,
        left_padding=False,
        compare_generate=not deeper_decoder,
    )


def random_t5_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of T5 and mT5."""
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "d_model": r.choice([16, 24, 30]),
        "d_kv": r.choice([3, 6, 8]),
        "d_ff": r.choice([24, 50]),
        "num_layers": r.choice([1, 2, 3]),
        "num_decoder_layers": r.choice([None, 1, 2]),
        "num_heads": heads,
        "relative_attention_num_buckets": r.choice([32, 12, 8]),
        "relative_attention_max_distance": r.choice([128, 40]),
        "layer_norm_epsilon": r.choice([1e-6, 1e-4]),
        "dropout_rate": r.choice([0.0, 0.1]),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    } | overrides


def can_peer_generate(config: Any) -> bool:
    """Whether transformers can generate. Its cache has as many layers as the encoder; the decoder cannot have more."""
    return bool(config.num_decoder_layers <= config.num_layers)


def untie_lm_head(model: Any) -> None:
    """Untie the head, as in published files of T5 1.1 and mT5; transformers unties it only on loading."""
    noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(7))
    model.lm_head.weight = torch.nn.Parameter(noise * 0.3)


def random_config_optional_head_dim(seed: int, **overrides: Any) -> dict[str, Any]:
    """`random_llama_config`, without head_dim for some seeds."""
    settings = random_llama_config(seed, **overrides)
    if seed in (0, 1):
        del settings["head_dim"]
    return settings


def set_partial_rotary_factor(settings: dict[str, Any], head_dim: int, seed: int) -> None:
    """Set a random partial_rotary_factor; dynamic scaling requires at least four rotary dimensions."""
    rope = settings["rope_parameters"]
    min_rotary_dim = 4 if rope["rope_type"] == "dynamic" else 2
    fractions = [
        fraction
        for fraction in (0.25, 0.4, 0.5, 0.75, 1.0)
        if head_dim * fraction % 2 == 0 and head_dim * fraction >= min_rotary_dim
    ]
    rope["partial_rotary_factor"] = rng(seed).choice(fractions)
    for name in ("short_factor", "long_factor"):
        if name in rope:
            rope[name] = rope[name][: int(head_dim * rope["partial_rotary_factor"]) // 2]


def random_config_without_head_dim(seed: int, *dropped: str) -> dict[str, Any]:
    """`random_llama_config` for families where head_dim is always hidden_size / num_attention_heads."""
    settings = random_llama_config(seed)
    settings["hidden_size"] = settings["num_attention_heads"] * settings.pop("head_dim")
    return {key: value for key, value in settings.items() if key not in dropped}


def random_gemma_config(seed: int, act: str, **overrides: Any) -> dict[str, Any]:
    """Random config of Gemma 1 to 3."""
    r = rng(seed)
    return (
        random_llama_config(seed, attention_bias=r.random() < 0.5)
        | {act: r.choice(["gelu_pytorch_tanh", "silu", "relu"])}
        | overrides
    )


def random_gemma2_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of Gemma 2 and 3, with layers of both types, or one layer."""
    r = rng(seed + 100)
    layers = r.choice([1, 2, 3, 4])
    sliding = "sliding_attention"
    types = [sliding, *(r.choice([sliding, "full_attention"]) for _ in range(max(0, layers - 2))), "full_attention"][
        :layers
    ]
    return (
        random_gemma_config(seed, "hidden_activation")
        | {
            "num_hidden_layers": layers,
            "layer_types": types,
            "sliding_window": r.choice([1, 3, 5]),
            "query_pre_attn_scalar": r.choice([6, 20, 144]),
            "final_logit_softcapping": r.choice([None, 3.0]),
        }
        | overrides
    )


def random_cohere_config(seed: int, **overrides: Any) -> dict[str, Any]:
    """Random config of Cohere and Cohere 2."""
    r = rng(seed + 30)
    settings = random_llama_config(seed, attention_bias=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu"]))
    settings |= {"layer_norm_eps": settings.pop("rms_norm_eps"), "logit_scale": r.choice([0.0625, 0.3, 1.7])}
    return settings | overrides
