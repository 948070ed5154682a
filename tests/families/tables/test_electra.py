"""ELECTRA: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


def settings(seed: int, **given: Any) -> Any:
    """Token tables narrower than the stream, as wide, and wider; an untied head needs one as wide."""
    drawn = random_bert_config(seed)
    wide = drawn["hidden_size"]
    width = rng(seed).choice([10, 14, wide, 2 * wide]) if drawn["tie_word_embeddings"] else wide
    return transformers.ElectraConfig(**drawn | {"embedding_size": width} | given)


@pytest.mark.parametrize("seed", range(8))
def test_electras_generator_is_the_peers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(settings(seed), transformers.AutoModelForMaskedLM, long_seq_len=40), tmp_path, seed)


@pytest.mark.parametrize("seed", range(8))
def test_electras_encoder_is_the_peers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(settings(seed, tie_word_embeddings=True), transformers.AutoModel, long_seq_len=40), tmp_path, seed
    )


def test_a_discriminator_is_an_encoder(tmp_path: Path) -> None:
    model = transformers.ElectraForPreTraining(settings(1, tie_word_embeddings=True)).eval()
    model.save_pretrained(tmp_path)
    ours: Any = ct.load(tmp_path)
    assert len(ours.load_report.ignored_weights) == 4
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours.model.encode(tokens), model.electra(tokens).last_hidden_state)


def test_a_narrow_head_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config({"model_type": "electra", "tie_word_embeddings": False})
