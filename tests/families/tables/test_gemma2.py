"""Gemma 2: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_gemma2_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gemma2_matches_transformers(seed: int, tmp_path: Path) -> None:
    settings = random_gemma2_config(seed, attn_logit_softcapping=rng(seed + 8).choice([None, 2.0, 50.0]))
    check_family(
        PeerModel(transformers.Gemma2Config(**settings), long_seq_len=40, use_cache=settings["sliding_window"] > 1),
        tmp_path,
        seed,
    )


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 128,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 46,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 144,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
            "vocab_size": 256000,
        },
        "gemma-2-27b",
    )
