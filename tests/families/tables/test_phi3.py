"""Phi-3: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_phi3_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed + 50)
    fraction = r.choice([1.0, 0.75, 0.5])
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": r.choice([1e4, 2.5e5]),
        "partial_rotary_factor": fraction,
    }
    settings = random_llama_config(
        seed, hidden_act=r.choice(["silu", "gelu"]), sliding_window=[None, 5, 1, None][seed % 4]
    )
    if seed % 2:  # transformers requires factors for a head dimension of hidden_size / heads
        settings["hidden_size"] = 8 * settings["num_attention_heads"]
        settings["original_max_position_embeddings"] = 16
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": 16}
        rope["short_factor"] = [round(r.uniform(1, 2), 2) for _ in range(int(8 * fraction) // 2)]
        rope["long_factor"] = [round(r.uniform(2, 6), 2) for _ in range(int(8 * fraction) // 2)]
        rope |= [{}, {"factor": 3.0}, {"attention_factor": 1.3}, {}][seed // 2]
    settings |= {"head_dim": 8, "rope_parameters": rope}
    peer = PeerModel(transformers.Phi3Config(**settings), long_seq_len=40, use_cache=settings["sliding_window"] != 1)
    check_family(peer, tmp_path, seed)


LONG: dict[str, Any] = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


@pytest.mark.parametrize("rope_type", ["longrope", "yarn"])
@pytest.mark.parametrize("original", [4096, 8192])
def test_legacy_configs_are_read_as_in_transformers(rope_type: str, original: int) -> None:
    scaling = {"rope_scaling": LONG["rope_scaling"] | {"type": rope_type}, "original_max_position_embeddings": original}
    config = check_legacy_config(LONG | scaling)
    # transformers renames 'su' only after validating longrope, so it rejects the first releases.
    assert (
        families()["phi3"].config_from_hf(LONG | scaling | {"rope_scaling": LONG["rope_scaling"] | {"type": "su"}})[0]
        == config
    )


def test_default_original_length_matches_transformers() -> None:
    check_legacy_config({key: value for key, value in LONG.items() if key != "original_max_position_embeddings"})


def test_published_config_is_read_as_in_transformers() -> None:
    settings: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047}
    settings |= {
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    }
    check_legacy_config(LONG | settings | {"partial_rotary_factor": 1.0}, "phi-3-mini-4k")


def test_other_rope_scaling_is_an_error() -> None:
    with pytest.raises(ConfigError, match="longrope and default"):
        families()["phi3"].config_from_hf(LONG | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
