"""MPT: config fields and weight mappings against transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import cutaway as ct
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs


def pass_alibi_bias_max(model: Any) -> None:
    """Fix transformers, which ignores `alibi_bias_max` and always uses 8."""
    base_model = model.transformer
    base_model.build_mpt_alibi_tensor = partial(
        build_mpt_alibi_tensor, alibi_bias_max=model.config.attn_config.alibi_bias_max
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_mpt_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = [1, 2, 3, 4, 5, 6, 8, 12][seed]
    config = transformers.MptConfig(
        vocab_size=r.choice([61, 97, 130]),
        d_model=heads * r.choice([5, 8]),
        n_layers=r.choice([1, 2, 3]),
        n_heads=heads,
        max_seq_len=64,
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        attn_config={
            "clip_qkv": r.choice([None, 0.5]),
            "softmax_scale": r.choice([None, 0.4]),
            "alibi_bias_max": r.choice([8, 6, 16]),
        },
        tie_word_embeddings=r.random() < 0.7,
    )
    check_family(
        PeerModel(config, long_seq_len=60, pass_position_ids=False, modify_model=pass_alibi_bias_max), tmp_path, seed
    )


def test_published_config_equals_preset() -> None:
    """mosaicml/mpt-7b."""
    attention = {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    }
    hf_config = {
        "model_type": "mpt",
        "attn_config": attention,
        "d_model": 4096,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "vocab_size": 50432,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("mpt-7b"))
    with pytest.raises(ConfigError, match="attn_type"):
        ct.config(hf_config | {"attn_config": attention | {"attn_type": "multiquery_attention"}})
