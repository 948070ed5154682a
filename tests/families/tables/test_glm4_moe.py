"""GLM-4 MoE: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng


def random_config(seed: int) -> dict[str, Any]:
    r = rng(seed)
    groups, top_groups, size = [(2, 1, 3), (1, 1, 5), (3, 2, 2), (1, 1, 4)][seed % 4]
    settings = random_llama_config(
        seed,
        attention_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        experts_implementation="eager",  # the default implementation rejects odd dimensions
    )
    experts = {
        "moe_intermediate_size": r.choice([6, 9]),
        "n_shared_experts": r.choice([1, 2]),
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": top_groups,
        "num_experts_per_tok": min(1 + seed, top_groups * size),
        "norm_topk_prob": seed % 3 > 0,
        "routed_scaling_factor": r.choice([1.0, 2.5]),
    }
    layers, intermediate_size = settings["num_hidden_layers"], settings.pop("intermediate_size")
    dense = r.randint(0, layers - (seed != 5))
    settings |= experts if dense < layers else {}  # keys of absent layer kinds are left out
    factor = r.choice([0.5, 1.0])
    if settings["rope_parameters"]["rope_type"] == "longrope" or (settings["head_dim"] // 2) % 2:
        factor = 1.0
    settings["rope_parameters"] |= {"partial_rotary_factor": factor}
    settings["use_qk_norm"] = seed % 2 == 0
    return settings | ({"intermediate_size": intermediate_size} if dense else {}) | {"first_k_dense_replace": dense}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_glm4_moe_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(transformers.Glm4MoeConfig(**random_config(seed)), long_seq_len=40), tmp_path, seed)
