"""GPTBigCode: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_gpt_bigcode_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([2, 3, 4])
    config = transformers.GPTBigCodeConfig(
        vocab_size=r.choice([61, 97, 130]),
        n_positions=40,
        n_embd=heads * r.choice([5, 8]),
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        n_inner=r.choice([None, 30]),
        activation_function=r.choice(["gelu_pytorch_tanh", "gelu", "relu"]),
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        scale_attn_weights=r.random() < 0.7,
        multi_query=seed % 2 == 0,
        tie_word_embeddings=r.random() < 0.7,
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)
