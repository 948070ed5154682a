"""MPNet: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family


def settings(seed: int, **overrides: Any) -> dict[str, Any]:
    """Sequences long enough for the last bucket; no token types, and pad_token_id is always 1."""
    config = random_bert_config(
        seed, max_position_embeddings=202, pad_token_id=1, bos_token_id=0, eos_token_id=2, **overrides
    )
    return {key: value for key, value in config.items() if key != "type_vocab_size"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_mpnet_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.MPNetConfig(**settings(seed))
    unused = () if config.tie_word_embeddings else ("lm_head.bias",)
    peer = PeerModel(
        config, transformers.AutoModelForMaskedLM, long_seq_len=200, pass_position_ids=False, unused_parameters=unused
    )
    check_family(peer, tmp_path, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_mpnet_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.MPNetConfig(**settings(seed, tie_word_embeddings=True))
    check_family(PeerModel(config, transformers.AutoModel, long_seq_len=200, pass_position_ids=False), tmp_path, seed)
