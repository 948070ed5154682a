"""Phi: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config, set_partial_rotary_factor
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_phi_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed, qk_layernorm=seed % 3 == 0, hidden_act=r.choice(["gelu_new", "gelu"]))
    if settings["qk_layernorm"]:  # the QK-norms of transformers have dimension hidden_size / num_attention_heads
        settings["hidden_size"] = settings["num_attention_heads"] * settings["head_dim"]
    settings["layer_norm_eps"] = settings.pop("rms_norm_eps")
    set_partial_rotary_factor(settings, settings["head_dim"], seed)
    check_family(PeerModel(transformers.PhiConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """microsoft/phi-2."""
    hf_config = {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 51200,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("phi-2"))
