"""GPT-J: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.families.config_tree import diff_configs


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gptj_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads, width = r.choice([1, 2, 3, 4]), r.choice([5, 6, 8])
    config = transformers.GPTJConfig(
        vocab_size=r.choice([61, 97, 130]),
        n_positions=40,
        n_embd=heads * width,
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        rotary_dim=r.choice([2, 4, width - width % 2]),
        n_inner=r.choice([None, 30]),
        activation_function=r.choice(["gelu_new", "gelu", "relu"]),
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        tie_word_embeddings=r.random() < 0.4,
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_published_config_equals_preset() -> None:
    """EleutherAI/gpt-j-6b."""
    hf_config = {
        "model_type": "gptj",
        "activation_function": "gelu_new",
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary": True,
        "rotary_dim": 64,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    }
    assert not diff_configs(ct.config(hf_config), ct.config("gpt-j-6b"))
