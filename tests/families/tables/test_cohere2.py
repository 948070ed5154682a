"""Command R7B: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_cohere_config
from support.family_parity import PeerModel, check_family, check_legacy_config, rng

from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_cohere2_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed + 100)
    settings = random_cohere_config(seed)
    width = settings.pop("head_dim")  # transformers computes it
    layers = r.choice([1, 2, 3, 4, 5])
    sliding, full = "sliding_attention", "full_attention"
    types = [sliding, *(r.choice([sliding, full]) for _ in range(max(0, layers - 2))), full][:layers]
    settings |= {"hidden_size": width * settings["num_attention_heads"], "num_hidden_layers": layers}
    settings |= {"sliding_window": r.choice([2, 3, 5]), "layer_types": r.choice([types, None])}
    check_family(PeerModel(transformers.Cohere2Config(**settings), long_seq_len=40), tmp_path, seed)


PUBLISHED: dict[str, Any] = {
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 132096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "vocab_size": 256000,
}


def test_published_config_is_read_as_in_transformers() -> None:
    check_legacy_config(PUBLISHED, "command-r7b")
    check_legacy_config(PUBLISHED | {"sliding_window_pattern": 3})


def test_unsupported_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match="does not support"):
        families()["cohere2"].config_from_hf(PUBLISHED | {"layer_switch": 2})
