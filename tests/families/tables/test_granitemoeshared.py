"""Granite MoE with a shared expert: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_granitemoeshared_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        num_local_experts=4,
        num_experts_per_tok=r.randint(1, 4),
        shared_intermediate_size=r.choice([0, 20, 30]),
        attention_multiplier=r.choice([0.3, 1.0]),
        residual_multiplier=r.choice([0.22, 1.0]),
        logits_scaling=r.choice([1.0, 6.0]),
        attention_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )
    check_family(PeerModel(transformers.GraniteMoeSharedConfig(**settings), long_seq_len=40), tmp_path, seed)
