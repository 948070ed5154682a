"""Gemma: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_gemma_config
from support.family_parity import PeerModel, check_family, check_legacy_config


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gemma_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(transformers.GemmaConfig(**random_gemma_config(seed, "hidden_act")), long_seq_len=40), tmp_path, seed
    )


def test_first_release_config_is_read_as_in_transformers() -> None:
    config = check_legacy_config(
        {
            "model_type": "gemma",
            "architectures": ["GemmaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 256,
            "hidden_act": "gelu",
            "hidden_activation": None,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "vocab_size": 256000,
        },
        "gemma-2b",
    )
    assert config.stacks["decoder"].blocks[0].ffn.activation == "gelu_tanh"
