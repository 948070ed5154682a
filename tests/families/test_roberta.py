"""RoBERTa: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from families.test_bert import kin
from family_parity import Peer, check_family


def settings(seed: int, **given: Any) -> dict[str, Any]:
    """The padding token's number shifts the positions."""
    return kin(seed, pad_token_id=[1, 0, 3, 1][seed % 4], bos_token_id=0, eos_token_id=2, **given)


@pytest.mark.parametrize("seed", range(8))
def test_roberta_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**settings(seed))
    dead = () if config.tie_word_embeddings else ("lm_head.bias",)
    peer = Peer(config, transformers.AutoModelForMaskedLM, long=36, positions=False, dead=dead)
    check_family(peer, tmp_path, seed)


@pytest.mark.parametrize("seed", range(8))
def test_roberta_without_its_head_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**settings(seed, tie_word_embeddings=True))
    check_family(Peer(config, transformers.AutoModel, long=36, positions=False), tmp_path, seed)
