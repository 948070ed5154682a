"""DeepSeek-V3: config fields and weight mappings against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families import families


def random_config(seed: int) -> dict[str, Any]:
    r = rng(seed + 100)
    settings = random_llama_config(seed)
    groups, top_groups, size = [(2, 1, 3), (1, 1, 5), (3, 2, 2), (4, 2, 2)][seed % 4]
    experts = {
        "moe_intermediate_size": r.choice([6, 9]),
        "n_shared_experts": r.choice([1, 2]),
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": top_groups,
        "num_experts_per_tok": min(1 + seed, top_groups * size),
        "norm_topk_prob": seed % 3 > 0,
        "routed_scaling_factor": r.choice([1.0, 2.5]),
    }
    if seed in (1, 7):  # without `mscale`, so that cos and sin are scaled, too; transformers does not require YaRN
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
        "q_lora_rank": [None, 10][seed % 2],
        "kv_lora_rank": r.choice([6, 12]),
        "attention_bias": r.random() < 0.5,
        "rope_interleave": r.random() < 0.6,
        "hidden_act": r.choice(["silu", "gelu"]),
        "experts_implementation": "eager",  # the default implementation rejects odd dimensions
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_deepseek_v3_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(transformers.DeepseekV3Config(**random_config(seed)), long_seq_len=40), tmp_path, seed)


PUBLISHED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(PUBLISHED, "deepseek-v3")
    check_legacy_config(PUBLISHED | {"rope_scaling": None, "q_lora_rank": None, "n_group": 1, "topk_group": 1})


@pytest.mark.parametrize(
    "change",
    [{"scoring_func": "softmax"}, {"topk_method": "greedy"}, {"moe_layer_freq": 2}, {"num_key_value_heads": 8}],
)
def test_unsupported_value_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="deepseek_v3"):
        families()["deepseek_v3"].config_from_hf(PUBLISHED | change)


def test_multi_token_prediction_layer_is_ignored(tmp_path: Path) -> None:
    settings = random_config(1) | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    extra = {name.replace(".1.", ".2.", 1): tensor.clone() for name, tensor in last.items()}
    extra["model.layers.2.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"num_nextn_predict_layers": 1}))
    report = ct.load(tmp_path).load_report
    assert report is not None
    assert report.ignored_weights.keys() == extra.keys()
