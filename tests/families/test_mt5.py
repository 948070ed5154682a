"""mT5: fields and rows against transformers."""

from pathlib import Path

import pytest
import transformers
from families.test_t5 import PROJECTIONS, generates, kin, untie
from family_parity import Peer, check_family


@pytest.mark.parametrize("seed", range(8))
def test_mt5_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.MT5Config(**kin(seed, feed_forward_proj=PROJECTIONS[seed - 1]))
    how = {"long": 180, "tweak": untie if seed % 2 else None, "greedy": generates(config)}
    peer = Peer(config, transformers.AutoModelForSeq2SeqLM, **how)
    assert check_family(peer, tmp_path, seed).config.head.tied != bool(seed % 2)
