"""Llama: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_extra_tensors, check_family, rng


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_llama_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(
        seed, attention_bias=r.random() < 0.5, mlp_bias=r.random() < 0.5, hidden_act=r.choice(["silu", "gelu"])
    )
    check_family(PeerModel(transformers.LlamaConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_extra_tensors_are_ignored(tmp_path: Path) -> None:
    """RoPE frequencies of the model, as in newer code."""
    settings = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**settings, num_attention_heads=2, tie_word_embeddings=True, pad_token_id=0)
    once = {"model.rotary_emb.inv_freq": torch.ones(4)}
    check_extra_tensors(transformers.LlamaForCausalLM(config), tmp_path / "once", once)
