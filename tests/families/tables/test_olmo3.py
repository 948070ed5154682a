"""OLMo 3: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_olmo3_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed)
    layers = settings["num_hidden_layers"]
    settings["layer_types"] = [r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    if "sliding_attention" in settings["layer_types"]:
        settings["sliding_window"] = r.choice([2, 5, 16])
    settings["hidden_size"] = settings["num_attention_heads"] * settings.pop("head_dim")
    scaled, sliding = settings["rope_parameters"], {"rope_type": "default", "rope_theta": r.choice([1e4, 5e5])}
    scaled = scaled if "full_attention" in settings["layer_types"] else {"rope_type": "default", "rope_theta": 5e5}
    sliding = sliding if "sliding_attention" in settings["layer_types"] else sliding | {"rope_theta": 5e5}
    settings["rope_parameters"] = {"full_attention": scaled, "sliding_attention": sliding}
    settings |= {"attention_bias": r.random() < 0.5, "hidden_act": r.choice(["silu", "gelu"])}
    check_family(PeerModel(transformers.Olmo3Config(**settings), long_seq_len=40), tmp_path, seed)


def test_published_config_is_read_as_in_transformers() -> None:
    published = {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 65536,
    }
    config = check_legacy_config(published)
    scalings = [block.attention.position.scaling.kind for block in config.decoder.blocks]
    assert scalings == ["none", "none", "none", "yarn"]
