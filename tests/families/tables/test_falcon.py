"""Falcon: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_config_without_head_dim
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"new_decoder_architecture": True},
    {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 2},
    {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    {"multi_query": False, "parallel_attn": False},
    {"new_decoder_architecture": True, "bias": True},
    {"parallel_attn": False, "alibi": True},
    {"multi_query": False, "bias": True},
]
"""7b, 40b, 11b, rw, and other combinations."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(16))
def test_falcon_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    layout = dict(LAYOUTS[seed % 8])
    settings = random_config_without_head_dim(
        seed + seed // 8, "num_key_value_heads", "rms_norm_eps", "intermediate_size"
    )
    width = settings["hidden_size"] // settings["num_attention_heads"]
    if layout.get("num_kv_heads"):
        settings |= {"num_attention_heads": 6, "hidden_size": 6 * width}
    elif layout.get("new_decoder_architecture"):
        heads = settings["num_attention_heads"]
        layout["num_kv_heads"] = r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    if layout.get("alibi"):
        heads = r.choice([7, 12, 16])
        settings |= {"rope_parameters": None, "hidden_size": heads * width, "num_attention_heads": heads}
    settings |= layout | {
        "ffn_hidden_size": r.choice([None, 30]),
        "activation": r.choice(["gelu", "relu"]),
        "layer_norm_epsilon": r.choice([1e-5, 1e-3]),
    }
    # With ALiBi, the eager path of transformers adds the bias twice.
    alibi = bool(layout.get("alibi"))
    peer = PeerModel(transformers.FalconConfig(**settings), long_seq_len=300 if alibi else 40, skip_eager=alibi)
    check_family(peer, tmp_path, seed)


def test_published_configs_equal_presets() -> None:
    """tiiuae/falcon-7b, falcon-40b and falcon-rw-1b."""
    falcon_7b = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32}
    falcon_7b |= {"multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "alibi": False}
    assert not diff_configs(ct.config(falcon_7b), ct.config("falcon-7b"))
    falcon_40b = falcon_7b | {"hidden_size": 8192, "num_attention_heads": 128, "num_hidden_layers": 60}
    falcon_40b |= {"new_decoder_architecture": True, "num_kv_heads": 8}
    assert not diff_configs(ct.config(falcon_40b), ct.config("falcon-40b"))
    falcon_rw_1b = {"model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24}
    falcon_rw_1b |= {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False, "vocab_size": 50304}
    assert not diff_configs(ct.config(falcon_rw_1b), ct.config("falcon-rw-1b"))
