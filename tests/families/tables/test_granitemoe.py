"""Granite-MoE: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_granitemoe_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    experts = r.choice([2, 3, 5, 6])
    settings = random_config_optional_head_dim(
        seed,
        num_local_experts=experts,
        num_experts_per_tok=r.randint(1, experts),
        embedding_multiplier=r.choice([1.0, 12.0]),
        attention_multiplier=r.choice([0.3, 1.0]),
        residual_multiplier=r.choice([0.22, 1.0]),
        logits_scaling=r.choice([1.0, 6.0]),
        attention_bias=r.random() < 0.5,
        attention_dropout=r.choice([0.0, 0.1]),
        hidden_act=r.choice(["silu", "gelu"]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )
    check_family(PeerModel(transformers.GraniteMoeConfig(**settings), long_seq_len=40), tmp_path, seed)
