"""StableLM: fields and rows against transformers."""

from pathlib import Path

import pytest
import transformers
from family_parity import Peer, check_family, rng
from test_gpt_neox import partly_turned, whole_heads

import cutaway as ct
from cutaway.families.tree import differences


@pytest.mark.parametrize("seed", range(8))
def test_stablelm_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = whole_heads(seed)
    partly_turned(settings, settings["hidden_size"] // settings["num_attention_heads"], seed)
    settings["layer_norm_eps"] = settings.pop("rms_norm_eps")
    settings |= {
        "hidden_act": r.choice(["silu", "gelu"]),
        "qk_layernorm": seed % 3 == 0,
        "use_parallel_residual": seed % 2 == 0,
        "use_qkv_bias": r.random() < 0.5,
    }
    check_family(Peer(transformers.StableLmConfig(**settings), long=40), tmp_path, seed)


def test_a_published_file_is_the_preset() -> None:
    """stabilityai/stablelm-2-12b."""
    theirs = {
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
    assert not differences(ct.config(theirs), ct.config("stablelm-2-12b"))
