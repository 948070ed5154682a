"""StarCoder2: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_starcoder2_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed, hidden_act=r.choice(["gelu_pytorch_tanh", "gelu"]), use_bias=r.random() < 0.6)
    # No window of 1: the cache of transformers keeps all keys then, and differs from its forward pass without cache.
    settings |= {"norm_epsilon": settings.pop("rms_norm_eps"), "sliding_window": r.choice([None, 2, 4, 9])}
    check_family(PeerModel(transformers.Starcoder2Config(**settings), long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """bigcode/starcoder2-7b."""
    hf_config = {
        "model_type": "starcoder2",
        "attention_dropout": 0.1,
        "embedding_dropout": 0.1,
        "hidden_size": 4608,
        "intermediate_size": 18432,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "num_attention_heads": 36,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "residual_dropout": 0.1,
        "rope_theta": 1000000,
        "sliding_window": 4096,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("starcoder2-7b"))
