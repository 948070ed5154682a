"""BioGPT: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_biogpt_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    config = transformers.BioGptConfig(
        vocab_size=r.choice([61, 97, 130]),
        hidden_size=heads * r.choice([5, 8]),
        num_hidden_layers=r.choice([1, 2, 3]),
        num_attention_heads=heads,
        intermediate_size=r.choice([24, 50]),
        hidden_act=r.choice(["gelu", "relu"]),
        max_position_embeddings=40,
        scale_embedding=r.random() < 0.5,
        activation_dropout=r.choice([0.0, 0.1]),
        tie_word_embeddings=r.random() < 0.7,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)
