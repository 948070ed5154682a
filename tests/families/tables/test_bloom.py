"""BLOOM: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_bloom_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = [1, 2, 3, 4, 5, 6, 8, 12][seed]
    config = transformers.BloomConfig(
        vocab_size=r.choice([61, 97, 130]),
        hidden_size=heads * r.choice([5, 8]),
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        pretraining_tp=r.choice([1, 4]),
        tie_word_embeddings=r.random() < 0.7,
        apply_residual_connection_post_layernorm=seed % 2 == 0,
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=60, pass_position_ids=False), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """bigscience/bloom-560m has legacy key names."""
    hf_config = {
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "n_embed": 1024,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "pretraining_tp": 1,
        "seq_length": 2048,
        "slow_but_exact": False,
        "vocab_size": 250880,
    }
    assert ct.config(hf_config) == ct.config("bloom-560m").replace(decoder=ct.config(hf_config).decoder)
    assert not diff_configs(ct.config(hf_config), ct.config("bloom-560m"))
    with pytest.raises(ConfigError, match="slow_but_exact"):
        ct.config(hf_config | {"slow_but_exact": True})
