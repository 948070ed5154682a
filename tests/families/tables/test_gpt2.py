"""GPT-2: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from support.family_parity import PeerModel, check_extra_tensors, check_family, rng


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_gpt2_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    config = transformers.GPT2Config(
        vocab_size=r.choice([61, 97, 130]),
        n_positions=40,
        n_embd=heads * r.choice([5, 8]),
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        n_inner=r.choice([None, 30]),
        activation_function=r.choice(["gelu_new", "gelu", "relu", "mish"]),
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        scale_attn_weights=r.random() < 0.7,
        scale_attn_by_inverse_layer_idx=r.random() < 0.3,
        tie_word_embeddings=r.random() < 0.7,
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_value_head_is_ignored(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=61, n_positions=40, n_embd=16, n_layer=2, n_head=2, pad_token_id=0)
    value = {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)}
    check_extra_tensors(transformers.GPT2LMHeadModel(config), tmp_path / "value", value)
