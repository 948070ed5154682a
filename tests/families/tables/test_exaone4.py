"""EXAONE 4: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng

LAYER_TYPES = (["sliding_attention", "full_attention"], ["full_attention"] * 2, ["sliding_attention"] * 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_exaone4_matches_transformers(seed: int, tmp_path: Path) -> None:
    """Layers with and without a window; without any, the full-attention layers have RoPE."""
    r = rng(seed)
    settings = random_llama_config(seed, num_hidden_layers=2, hidden_act=r.choice(["silu", "gelu"]))
    settings["layer_types"] = LAYER_TYPES[seed % 3]
    if seed % 3 != 1:
        settings["sliding_window"] = r.choice([2, 5, 16])
    elif seed > 3:
        settings["sliding_window"] = None
    if settings["layer_types"] == LAYER_TYPES[1] and seed <= 3:  # no layer has RoPE, so its settings have no effect
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    check_family(PeerModel(transformers.Exaone4Config(**settings), long_seq_len=40), tmp_path, seed)
