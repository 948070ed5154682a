"""Helium: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_helium_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5)
    settings["hidden_size"] = settings["num_attention_heads"] * settings["head_dim"]
    check_family(PeerModel(transformers.HeliumConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_heads_of_another_dimension_are_an_error() -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        ct.config({"model_type": "helium", "head_dim": 64})
