"""GPT-Neo: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs

LAYERS: list[Any] = [
    [[["global", "local"], 2]],
    [[["global"], 1]],
    [[["local"], 2]],
    [[["global", "local", "local"], 1]],
    [[["local", "global"], 1]],
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gpt_neo_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    types = LAYERS[seed % len(LAYERS)]
    config = transformers.GPTNeoConfig(
        vocab_size=r.choice([61, 97, 130]),
        max_position_embeddings=40,
        hidden_size=heads * r.choice([5, 8]),
        num_layers=len(types[0][0]) * types[0][1],
        attention_types=types,
        num_heads=heads,
        intermediate_size=r.choice([None, 30]),
        window_size=r.choice([2, 3, 5]) if "local" in types[0][0] else 256,
        activation_function=r.choice(["gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        tie_word_embeddings=r.random() < 0.7,
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """EleutherAI/gpt-neo-125m has both attention_types and attention_layers."""
    hf_config = {
        "model_type": "gpt_neo",
        "activation_function": "gelu_new",
        "attention_layers": ["global", "local"] * 6,
        "attention_types": [[["global", "local"], 6]],
        "hidden_size": 768,
        "intermediate_size": None,
        "num_heads": 12,
        "num_layers": 12,
        "window_size": 256,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("gpt-neo-125m"))
    with pytest.raises(ConfigError, match="use 12"):
        ct.config(hf_config | {"attention_layers": ["global"]})
