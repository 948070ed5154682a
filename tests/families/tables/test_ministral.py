"""Ministral: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_ministral_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed)
    layers = settings["num_hidden_layers"]
    settings["layer_types"] = [r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if "sliding_attention" in settings["layer_types"]:
        settings["sliding_window"] = r.choice([2, 5, 16])
    check_family(PeerModel(transformers.MinistralConfig(**settings), long_seq_len=40), tmp_path, seed)
