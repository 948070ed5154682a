"""MPNet: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family


def settings(seed: int, **given: Any) -> dict[str, Any]:
    """Texts long enough for the farthest bucket; no token types, and padding is always token 1."""
    drawn = random_bert_config(
        seed, max_position_embeddings=202, pad_token_id=1, bos_token_id=0, eos_token_id=2, **given
    )
    return {key: value for key, value in drawn.items() if key != "type_vocab_size"}


@pytest.mark.parametrize("seed", range(8))
def test_mpnet_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.MPNetConfig(**settings(seed))
    dead = () if config.tie_word_embeddings else ("lm_head.bias",)
    peer = PeerModel(
        config, transformers.AutoModelForMaskedLM, long_seq_len=200, pass_position_ids=False, unused_parameters=dead
    )
    check_family(peer, tmp_path, seed)


@pytest.mark.parametrize("seed", range(8))
def test_mpnet_without_its_head_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.MPNetConfig(**settings(seed, tie_word_embeddings=True))
    check_family(PeerModel(config, transformers.AutoModel, long_seq_len=200, pass_position_ids=False), tmp_path, seed)
