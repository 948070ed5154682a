"""Marian: fields and rows against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from families.test_bart import kin, peer
from family_parity import check_family, rng


def settings(seed: int) -> dict[str, Any]:
    """One table for both sides, or two of different sizes, with the head tied to the target's or not."""
    drawn = kin(seed)
    if seed % 2:
        drawn["decoder_vocab_size"] = drawn["vocab_size"] + rng(seed).choice([-20, 0, 15])
        drawn["share_encoder_decoder_embeddings"] = False
        drawn["tie_word_embeddings"] = seed % 4 == 1
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_marian_is_the_peers(seed: int, tmp_path: Path) -> None:
    how = replace(peer(transformers.MarianConfig(**settings(seed))), frozen=("embed_positions",))
    loaded = check_family(how, tmp_path, seed)
    assert loaded.report is not None
    assert len(loaded.report.computed) == 2  # the peer writes no table of positions
