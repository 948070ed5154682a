"""Granite: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_granite_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        attention_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        attention_dropout=r.choice([0.0, 0.1]),
        embedding_multiplier=r.choice([1.0, 3, 12.0]),
        logits_scaling=r.choice([1.0, 8, 5.5]),
        residual_multiplier=r.choice([1.0, 0.22, 0.5]),
        attention_multiplier=r.choice([1.0, 0.125, 0.3]),
    )
    check_family(PeerModel(transformers.GraniteConfig(**settings), long_seq_len=40), tmp_path, seed)
