"""ELECTRA: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


def settings(seed: int, **overrides: Any) -> Any:
    """embedding_size smaller than, equal to and larger than hidden_size; an untied head requires it to be equal."""
    config = random_bert_config(seed)
    hidden_size = config["hidden_size"]
    embedding_size = (
        rng(seed).choice([10, 14, hidden_size, 2 * hidden_size]) if config["tie_word_embeddings"] else hidden_size
    )
    return transformers.ElectraConfig(**config | {"embedding_size": embedding_size} | overrides)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_electra_generator_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(settings(seed), transformers.AutoModelForMaskedLM, long_seq_len=40), tmp_path, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_electra_encoder_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(settings(seed, tie_word_embeddings=True), transformers.AutoModel, long_seq_len=40), tmp_path, seed
    )


def test_discriminator_loads_as_encoder(tmp_path: Path) -> None:
    model = transformers.ElectraForPreTraining(settings(1, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path)
    checkpoint: Any = ct.load(tmp_path)
    assert len(checkpoint.load_report.ignored_weights) == 4
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model.encode(tokens), model.electra(tokens).last_hidden_state)


def test_untied_head_with_factorized_embedding_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config({"model_type": "electra", "tie_word_embeddings": False})
