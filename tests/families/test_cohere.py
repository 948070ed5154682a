"""Command R: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from family_parity import Peer, check_family, check_older, rng
from test_llama import kin


def cohere_kin(seed: int, **given: Any) -> dict[str, Any]:
    """Settings of both generations."""
    r = rng(seed + 30)
    settings = kin(seed, attention_bias=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu"]))
    settings |= {"layer_norm_eps": settings.pop("rms_norm_eps"), "logit_scale": r.choice([0.0625, 0.3, 1.7])}
    return settings | given


@pytest.mark.parametrize("seed", range(8))
def test_cohere_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.CohereConfig(**cohere_kin(seed, use_qk_norm=seed % 2 == 0))
    check_family(Peer(config, long=40), tmp_path, seed)


def test_a_published_file_means_what_the_peer_reads() -> None:
    check_older(
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
