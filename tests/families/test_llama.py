"""Llama: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_parity import Peer, check_family, check_stored, rng

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.3},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "longrope", "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False, "beta_fast": 20.0},
]


def kin(seed: int, **given: Any) -> dict[str, Any]:
    """Settings that Llama and its kin have in common, drawn at random: every scaling comes up within eight seeds."""
    r = rng(seed)
    heads = r.choice([2, 3, 4, 6])
    kv = r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    width = r.choice([4, 8, 10])
    scaling = dict(SCALINGS[seed % len(SCALINGS)], rope_theta=r.choice([1e4, 5e5]))
    if scaling["rope_type"] == "longrope":
        scaling["short_factor"] = [round(r.uniform(1, 2), 2) for _ in range(width // 2)]
        scaling["long_factor"] = [round(r.uniform(2, 6), 2) for _ in range(width // 2)]
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "hidden_size": heads * r.choice([6, 8]),
        "intermediate_size": r.choice([24, 50]),
        "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width,
        "max_position_embeddings": 16 if scaling["rope_type"] == "dynamic" else 64,
        "rms_norm_eps": r.choice([1e-5, 1e-6]),
        "tie_word_embeddings": r.random() < 0.5,
        "rope_parameters": scaling,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
    } | given


@pytest.mark.parametrize("seed", range(8))
def test_llama_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = kin(
        seed, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu"])
    )
    check_family(Peer(transformers.LlamaConfig(**settings), long=40), tmp_path, seed)


def test_what_may_lie_beside_the_model(tmp_path: Path) -> None:
    """The frequencies once for all layers, as newer code keeps them; a classifier over a model with a tied head."""
    settings = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**settings, num_attention_heads=2, tie_word_embeddings=True, pad_token_id=0)
    once = {"model.rotary_emb.inv_freq": torch.ones(4)}
    check_stored(transformers.LlamaForCausalLM(config), tmp_path / "once", once)
    check_stored(transformers.LlamaForSequenceClassification(config), tmp_path / "classifier", {})
