"""XGLM: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_xglm_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    config = transformers.XGLMConfig(
        vocab_size=r.choice([61, 97, 130]),
        d_model=heads * 2 * r.choice([3, 4]),
        num_layers=r.choice([1, 2, 3]),
        attention_heads=heads,
        ffn_dim=r.choice([24, 50]),
        activation_function=r.choice(["gelu", "relu"]),
        max_position_embeddings=64,
        scale_embedding=r.random() < 0.5,
        activation_dropout=r.choice([0.0, 0.1]),
        tie_word_embeddings=r.random() < 0.7,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)
