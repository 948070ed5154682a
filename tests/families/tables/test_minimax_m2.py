"""MiniMax-M2: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_minimax_m2_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(
        seed,
        num_local_experts=4,
        num_experts_per_tok=r.randint(1, 4),
        attention_dropout=r.choice([0.0, 0.1]),
        hidden_act=r.choice(["silu", "gelu"]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )
    settings["rope_parameters"] = settings["rope_parameters"] | {"partial_rotary_factor": 0.5 if seed % 2 else 1.0}
    if settings["rope_parameters"]["rope_type"] == "longrope" or (settings["head_dim"] // 2) % 2:
        settings["rope_parameters"]["partial_rotary_factor"] = 1.0
    check_family(PeerModel(transformers.MiniMaxM2Config(**settings), long_seq_len=40), tmp_path, seed)


def test_published_rotary_dim_is_read_as_in_transformers() -> None:
    config = check_legacy_config(
        {"model_type": "minimax_m2", "num_hidden_layers": 2, "rotary_dim": 64, "rope_theta": 5000000}
    )
    assert config.decoder.blocks[0].attention.position.rotary_dim == 64
