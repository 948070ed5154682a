"""Marian: fields and rows against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import bart_peer, random_bart_config
from support.family_parity import check_family, rng


def settings(seed: int) -> dict[str, Any]:
    """One table for both sides, or two of different sizes, with the head tied to the target's or not."""
    drawn = random_bart_config(seed)
    if seed % 2:
        drawn["decoder_vocab_size"] = drawn["vocab_size"] + rng(seed).choice([-20, 0, 15])
        drawn["share_encoder_decoder_embeddings"] = False
        drawn["tie_word_embeddings"] = seed % 4 == 1
    return drawn


@pytest.mark.parametrize("seed", range(8))
def test_marian_is_the_peers(seed: int, tmp_path: Path) -> None:
    peer = replace(bart_peer(transformers.MarianConfig(**settings(seed))), frozen=("embed_positions",))
    loaded = check_family(peer, tmp_path, seed)
    assert loaded.load_report is not None
    assert len(loaded.load_report.computed_weights) == 2  # the peer writes no table of positions
