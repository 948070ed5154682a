"""Gemma 2: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from family_parity import Peer, check_family, check_older, rng
from test_gemma import gemma_kin


def layered(seed: int, **given: Any) -> dict[str, Any]:
    """Settings that Gemma 2 and 3 have beyond the first, with a layer of each type, or one alone."""
    r = rng(seed + 100)
    layers = r.choice([1, 2, 3, 4])
    near = "sliding_attention"
    types = [near, *(r.choice([near, "full_attention"]) for _ in range(max(0, layers - 2))), "full_attention"][:layers]
    return (
        gemma_kin(seed, "hidden_activation")
        | {
            "num_hidden_layers": layers,
            "layer_types": types,
            "sliding_window": r.choice([1, 3, 5]),
            "query_pre_attn_scalar": r.choice([6, 20, 144]),
            "final_logit_softcapping": r.choice([None, 3.0]),
        }
        | given
    )


@pytest.mark.parametrize("seed", range(8))
def test_gemma2_is_the_peers(seed: int, tmp_path: Path) -> None:
    settings = layered(seed, attn_logit_softcapping=rng(seed + 8).choice([None, 2.0, 50.0]))
    check_family(
        Peer(transformers.Gemma2Config(**settings), long=40, cached=settings["sliding_window"] > 1), tmp_path, seed
    )


def test_a_published_file_means_what_the_peer_reads() -> None:
    check_older(
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
