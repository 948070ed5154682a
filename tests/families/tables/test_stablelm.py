"""StableLM: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_without_head_dim, set_partial_rotary_factor
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_stablelm_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_without_head_dim(seed)
    set_partial_rotary_factor(settings, settings["hidden_size"] // settings["num_attention_heads"], seed)
    settings["layer_norm_eps"] = settings.pop("rms_norm_eps")
    settings |= {
        "hidden_act": r.choice(["silu", "gelu"]),
        "qk_layernorm": seed % 3 == 0,
        "use_parallel_residual": seed % 2 == 0,
        "use_qkv_bias": r.random() < 0.5,
    }
    check_family(PeerModel(transformers.StableLmConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """stabilityai/stablelm-2-12b."""
    hf_config = {
        "model_type": "stablelm",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": True,
        "rope_theta": 10000,
        "use_parallel_residual": True,
        "use_qkv_bias": False,
        "vocab_size": 100352,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("stablelm-2-12b"))
