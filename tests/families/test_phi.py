"""Phi: fields and rows against transformers."""

from pathlib import Path

import pytest
import transformers
from family_parity import Peer, check_family, rng
from test_gpt_neox import partly_turned
from test_llama import kin

import cutaway as ct
from cutaway.families.tree import differences


@pytest.mark.parametrize("seed", range(8))
def test_phi_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = kin(seed, qk_layernorm=seed % 3 == 0, hidden_act=r.choice(["gelu_new", "gelu"]))
    if settings["qk_layernorm"]:  # the peer's norms are as wide as hidden_size / num_attention_heads
        settings["hidden_size"] = settings["num_attention_heads"] * settings["head_dim"]
    settings["layer_norm_eps"] = settings.pop("rms_norm_eps")
    partly_turned(settings, settings["head_dim"], seed)
    check_family(Peer(transformers.PhiConfig(**settings), long=40), tmp_path, seed)


def test_a_published_file_is_the_preset() -> None:
    """microsoft/phi-2."""
    theirs = {
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
    assert not differences(ct.config(theirs), ct.config("phi-2"))
