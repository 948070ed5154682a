"""Marian: config fields and weight mappings against transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import bart_peer, random_bart_config
from support.family_parity import check_family, rng


def settings(seed: int) -> dict[str, Any]:
    """One shared embedding, or two of different sizes, with the head tied to that of the decoder or not."""
    config = random_bart_config(seed)
    if seed % 2:
        config["decoder_vocab_size"] = config["vocab_size"] + rng(seed).choice([-20, 0, 15])
        config["share_encoder_decoder_embeddings"] = False
        config["tie_word_embeddings"] = seed % 4 == 1
    return config


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_marian_matches_transformers(seed: int, tmp_path: Path) -> None:
    peer = replace(bart_peer(transformers.MarianConfig(**settings(seed))), frozen=("embed_positions",))
    loaded = check_family(peer, tmp_path, seed)
    assert loaded.load_report is not None
    assert len(loaded.load_report.computed_weights) == 2  # transformers does not save the position tables
