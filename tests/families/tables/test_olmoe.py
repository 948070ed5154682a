"""OLMoE: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_without_head_dim
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_olmoe_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    experts = r.choice([2, 3, 5, 6])
    settings = random_config_without_head_dim(seed) | {
        "num_experts": experts,
        "num_experts_per_tok": r.randint(1, experts),
        "norm_topk_prob": r.random() < 0.5,
        "attention_bias": r.random() < 0.5,
        "attention_dropout": r.choice([0.0, 0.1]),
        "hidden_act": r.choice(["silu", "gelu"]),
        "experts_implementation": "eager",  # the default implementation rejects odd dimensions
    }
    check_family(PeerModel(transformers.OlmoeConfig(**settings), long_seq_len=40), tmp_path, seed)


@pytest.mark.parametrize("change", [{"clip_qkv": 8.0}, {"head_dim": 64}])
def test_unsupported_value_is_an_error(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ct.config({"model_type": "olmoe"} | change)
