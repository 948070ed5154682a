"""DistilBERT: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_parity import PeerModel, check_extra_tensors, check_family, rng


def settings(seed: int, **overrides: Any) -> Any:
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    config = {
        "vocab_size": r.choice([61, 97, 130]),
        "dim": heads * r.choice([6, 8] if heads > 1 else [14, 20]),
        "n_layers": r.choice([1, 2, 3]),
        "n_heads": heads,
        "hidden_dim": r.choice([24, 50]),
        "activation": ["gelu", "relu", "silu", "gelu_pytorch_tanh"][seed % 4],
        "max_position_embeddings": r.choice([40, 44]),
        "sinusoidal_pos_embds": seed % 4 == 0,
        "dropout": r.choice([0.0, 0.1]),
        "attention_dropout": r.choice([0.0, 0.2]),
        "tie_word_embeddings": seed % 3 != 0,
        "pad_token_id": 0,
    }
    return transformers.DistilBertConfig(**config | overrides)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_distilbert_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(settings(seed), transformers.AutoModelForMaskedLM, long_seq_len=40), tmp_path, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_distilbert_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(settings(seed, tie_word_embeddings=True), transformers.AutoModel, long_seq_len=40), tmp_path, seed
    )


def test_legacy_norm_names_load(tmp_path: Path) -> None:
    model = transformers.DistilBertForMaskedLM(settings(1))

    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    check_extra_tensors(model, tmp_path, {}, transformers.AutoModelForMaskedLM, old)
