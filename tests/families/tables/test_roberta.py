"""RoBERTa: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family


def settings(seed: int, **overrides: Any) -> dict[str, Any]:
    """Several values of pad_token_id, which shifts the positions."""
    return random_bert_config(seed, pad_token_id=[1, 0, 3, 1][seed % 4], bos_token_id=0, eos_token_id=2, **overrides)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_roberta_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**settings(seed))
    unused = () if config.tie_word_embeddings else ("lm_head.bias",)
    peer = PeerModel(
        config, transformers.AutoModelForMaskedLM, long_seq_len=36, pass_position_ids=False, unused_parameters=unused
    )
    check_family(peer, tmp_path, seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_roberta_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**settings(seed, tie_word_embeddings=True))
    check_family(PeerModel(config, transformers.AutoModel, long_seq_len=36, pass_position_ids=False), tmp_path, seed)
