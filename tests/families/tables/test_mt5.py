"""mT5: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import FEED_FORWARD_PROJS, can_peer_generate, random_t5_config, untie_lm_head
from support.family_parity import PeerModel, check_family


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_mt5_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.MT5Config(**random_t5_config(seed, feed_forward_proj=FEED_FORWARD_PROJS[seed - 1]))
    peer = PeerModel(
        config,
        transformers.AutoModelForSeq2SeqLM,
        long_seq_len=180,
        modify_model=untie_lm_head if seed % 2 else None,
        compare_generate=can_peer_generate(config),
    )
    assert check_family(peer, tmp_path, seed).config.head.tied != bool(seed % 2)
