"""DeepSeek-V2: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

from cutaway.errors import ConfigError
from cutaway.families import families


def random_config(seed: int) -> dict[str, Any]:
    r = rng(seed + 100)
    settings = random_llama_config(seed)
    groups, top_groups, size = [(2, 1, 3), (1, 1, 5), (3, 2, 2), (4, 2, 1)][seed % 4]
    method = "group_limited_greedy" if seed % 2 == 0 else "greedy"
    experts = {
        "moe_intermediate_size": r.choice([6, 9]),
        "n_shared_experts": r.choice([1, 2]),
        "n_routed_experts": groups * size,
        "topk_method": method,
        "n_group": groups if method != "greedy" else None,
        "topk_group": top_groups if method != "greedy" else None,
        "num_experts_per_tok": min(1 + seed, top_groups * size),
        "routed_scaling_factor": r.choice([1.0, 16.0]),
    }
    if seed in (1, 7):  # without `mscale`, so that cos and sin are scaled, too
        settings["rope_parameters"]["mscale_all_dim"] = 0.6
    layers, intermediate_size = settings["num_hidden_layers"], settings.pop("intermediate_size")
    dense = r.randint(0, layers - (seed != 5))
    settings |= experts if dense < layers else {}  # keys of absent layer kinds are left out
    settings |= {"intermediate_size": intermediate_size} if dense else {}
    return settings | {
        "first_k_dense_replace": dense,
        "qk_rope_head_dim": settings.pop("head_dim"),
        "qk_nope_head_dim": r.choice([4, 6, 10]),
        "v_head_dim": r.choice([4, 6, 10]),
        "num_key_value_heads": settings["num_attention_heads"],
        "q_lora_rank": [None, 10][seed // 2 % 2],
        "kv_lora_rank": r.choice([6, 12]),
        "attention_bias": r.random() < 0.5,
        "mlp_bias": r.random() < 0.5,
        "attention_dropout": r.choice([0.0, 0.1]),
        "hidden_act": r.choice(["silu", "gelu"]),
        "experts_implementation": "eager",  # the default implementation rejects odd dimensions
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_deepseek_v2_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(transformers.DeepseekV2Config(**random_config(seed)), long_seq_len=40), tmp_path, seed)


PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}


def test_published_configs_equal_the_presets() -> None:
    check_legacy_config(PUBLISHED, "deepseek-v2")
    check_legacy_config(PUBLISHED | LITE, "deepseek-v2-lite")


@pytest.mark.parametrize(
    "change",
    [
        {"scoring_func": "sigmoid"},
        {"topk_method": "noaux_tc"},
        {"moe_layer_freq": 2},
        {"num_key_value_heads": 8},
        {"norm_topk_prob": True},
    ],
)
def test_unsupported_value_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        families()["deepseek_v2"].config_from_hf(PUBLISHED | change)
