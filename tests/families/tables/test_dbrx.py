"""DBRX: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_config_without_head_dim
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs


def random_config(seed: int) -> dict[str, Any]:
    r = rng(seed)
    llama = random_config_without_head_dim(seed)
    experts = r.choice([2, 3, 5, 6])
    rope = llama["rope_parameters"]
    ffn = {
        "ffn_hidden_size": r.choice([6, 9]),
        "ffn_act_fn": {"name": r.choice(["silu", "gelu"])},
        "moe_num_experts": experts,
        "moe_top_k": r.randint(1, experts),
        "moe_normalize_expert_weights": r.choice([1.0, None]),
    }
    attention = {
        "kv_n_heads": llama["num_key_value_heads"],
        "clip_qkv": r.choice([0.8, 2.5, 8.0]),  # transformers fails with the default, None
        "attn_pdrop": r.choice([0.0, 0.1]),
        "rope_theta": rope["rope_theta"],
    }
    return {
        "vocab_size": llama["vocab_size"],
        "d_model": llama["hidden_size"],
        "n_layers": llama["num_hidden_layers"],
        "n_heads": llama["num_attention_heads"],
        "max_seq_len": llama["max_position_embeddings"],
        "resid_pdrop": r.choice([0.0, 0.1]),
        "emb_pdrop": r.choice([0.0, 0.1]),
        "rope_parameters": rope,
        "attn_config": attention,
        "ffn_config": ffn,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_dbrx_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(transformers.DbrxConfig(**random_config(seed)), long_seq_len=40), tmp_path, seed)


PUBLISHED: dict[str, Any] = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05},
}


def test_published_config_equals_preset() -> None:
    """theta is in `attn_config`; transformers requires the key there but reads `rope_parameters`."""
    assert not diff_configs(ct.config(PUBLISHED), ct.config("dbrx-132b"))


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}),
        ("ffn_config", {"moe_jitter_eps": 0.1}),
        ("ffn_config", {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}),
    ],
)
def test_unsupported_value_is_an_error(part: str, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ct.config(PUBLISHED | {part: PUBLISHED[part] | change})


def test_tied_head_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config(PUBLISHED | {"tie_word_embeddings": True})
