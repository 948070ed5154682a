"""gpt-oss: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gpt_oss_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed + 100)
    layers, experts = [2, 3, 1, 2][seed % 4], [1, 3, 4, 6][seed % 4]
    sliding, full = "sliding_attention", "full_attention"
    settings = random_llama_config(
        seed,
        num_hidden_layers=layers,
        layer_types=[None, [sliding, full, full][:layers], [sliding] * layers][seed % 3],
        sliding_window=r.choice([2, 3, 5]),
        attention_bias=r.random() < 0.5,
        num_local_experts=experts,
        num_experts_per_tok=r.choice([k for k in (1, 2, 3) if k <= experts]),
        swiglu_limit=[7.0, 0.5][seed % 2],
        swiglu_alpha=r.choice([1.702, 0.9]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )
    check_family(PeerModel(transformers.GptOssConfig(**settings), long_seq_len=40), tmp_path, seed)


PUBLISHED: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(PUBLISHED, "gpt-oss-20b")
    check_legacy_config(
        {key: value for key, value in PUBLISHED.items() if "rope" not in key and "layer_types" not in key},
        "gpt-oss-20b",
    )


def test_quantization_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match="quantized"):
        families()["gpt_oss"].config_from_hf(PUBLISHED | {"quantization_config": {"quant_method": "mxfp4"}})
