"""Seed-OSS: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_seed_oss_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        attention_bias=r.random() < 0.5,
        attention_out_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.5,
        residual_dropout=r.choice([0.0, 0.1]),
        hidden_act=r.choice(["silu", "gelu"]),
    )
    check_family(PeerModel(transformers.SeedOssConfig(**settings), long_seq_len=40), tmp_path, seed)
