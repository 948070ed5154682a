"""ERNIE 4.5 (dense): config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_ernie4_5_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed, use_bias=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu"]))
    check_family(PeerModel(transformers.Ernie4_5Config(**settings), long_seq_len=40), tmp_path, seed)
