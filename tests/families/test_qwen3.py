"""Qwen3: fields and rows against transformers."""

from pathlib import Path

import pytest
import transformers
from family_parity import Peer, check_family, rng
from test_llama import kin
from test_qwen2 import WINDOWS


@pytest.mark.parametrize("seed", range(8))
def test_qwen3_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = kin(
        seed,
        attention_bias=r.random() < 0.5,
        hidden_act=r.choice(["silu", "gelu"]),
        attention_dropout=r.choice([0.0, 0.1]),
        **WINDOWS[seed],
    )
    check_family(Peer(transformers.Qwen3Config(**settings), long=40), tmp_path, seed)
