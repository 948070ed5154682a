"""ERNIE 4.5 MoE: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng

LAYERS = ((1, 3, 1), (0, 2, 1), (1, 3, 2), (2, 2, 3))
"""(first, last, interval) of the layers with experts, of four layers."""


def random_config(seed: int) -> dict[str, Any]:
    r = rng(seed)
    start, end, interval = LAYERS[seed % 4]
    experts = r.choice([3, 4])
    return random_llama_config(
        seed,
        num_hidden_layers=4,
        moe_layer_start_index=start,
        moe_layer_end_index=end,
        moe_layer_interval=interval,
        moe_num_experts=experts,
        moe_k=r.randint(1, experts),
        moe_num_shared_experts=r.choice([0, 1, 2]),
        moe_intermediate_size=r.choice([6, 9]),
        use_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_ernie4_5_moe_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(transformers.Ernie4_5_MoeConfig(**random_config(seed)), long_seq_len=40), tmp_path, seed)
