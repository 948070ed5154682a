"""SmolLM3: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
LAYOUTS: list[dict[str, Any]] = [
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 3, "no_rope_layer_interval": 2},
    {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 0], "no_rope_layer_interval": 2},
    {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3},
    {"num_hidden_layers": 2, "no_rope_layers": [1, 1], **WINDOW, "layer_types": [SLIDING, FULL]},
    {"num_hidden_layers": 2, "no_rope_layers": [0, 1], "no_rope_layer_interval": 1, **WINDOW},
    {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 1]},
    {"num_hidden_layers": 4, **WINDOW, "layer_types": [SLIDING, SLIDING, FULL, FULL]},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_smollm3_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        attention_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        attention_dropout=r.choice([0.0, 0.1]),
        **LAYOUTS[seed],
    )
    check_family(PeerModel(transformers.SmolLM3Config(**settings), long_seq_len=40), tmp_path, seed)
