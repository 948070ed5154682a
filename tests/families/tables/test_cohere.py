"""Command R: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_cohere_config
from support.family_parity import PeerModel, check_family, check_legacy_config


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_cohere_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.CohereConfig(**random_cohere_config(seed, use_qk_norm=seed % 2 == 0))
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(
        {
            "model_type": "cohere",
            "architectures": ["CohereForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 12288,
            "intermediate_size": 33792,
            "layer_norm_eps": 1e-05,
            "logit_scale": 0.8333333333333334,
            "max_position_embeddings": 131072,
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rope_theta": 75000000.0,
            "use_qk_norm": True,
            "vocab_size": 256000,
        },
        "command-r-plus",
    )
