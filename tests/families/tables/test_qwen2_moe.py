"""Qwen2-MoE: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng

UNUSED = 5632
"""intermediate_size of dense layers if there are none: it is not loaded, and the default is saved."""
LAYOUTS: list[dict[str, Any]] = [
    {"num_hidden_layers": 2, "intermediate_size": UNUSED},
    {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    {"num_hidden_layers": 4, "mlp_only_layers": [1, 3]},
    {"num_hidden_layers": 2, "intermediate_size": UNUSED, "use_sliding_window": True, "sliding_window": 4},
    {"num_hidden_layers": 3, "decoder_sparse_step": 3, "use_sliding_window": True, "sliding_window": 3},
    {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    {"num_hidden_layers": 2, "intermediate_size": UNUSED, "mlp_only_layers": [], "sliding_window": 3},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_qwen2_moe_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    experts = r.choice([2, 3, 5, 6])
    settings = random_config_optional_head_dim(
        seed,
        num_experts=experts,
        num_experts_per_tok=r.randint(1, experts),
        norm_topk_prob=r.random() < 0.5,
        moe_intermediate_size=r.choice([10, 17]),
        shared_expert_intermediate_size=r.choice([9, 14]),
        qkv_bias=r.random() < 0.5,
        experts_implementation="eager",  # the default implementation rejects odd dimensions
        hidden_act=r.choice(["silu", "gelu"]),
        attention_dropout=r.choice([0.0, 0.1]),
        **LAYOUTS[seed],
    )
    check_family(PeerModel(transformers.Qwen2MoeConfig(**settings), long_seq_len=40), tmp_path, seed)
