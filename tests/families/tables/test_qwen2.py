"""Qwen2: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import SLIDING_WINDOW_SETTINGS, random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng

from cutaway.families import families


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_qwen2_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_config_optional_head_dim(
        seed,
        hidden_act=r.choice(["silu", "gelu_pytorch_tanh"]),
        attention_dropout=r.choice([0.0, 0.1]),
        **SLIDING_WINDOW_SETTINGS[seed],
    )
    check_family(PeerModel(transformers.Qwen2Config(**settings), long_seq_len=40), tmp_path, seed)


@pytest.mark.parametrize("change", [{"use_sliding_window": True, "sliding_window": None}, {"sliding_window": 8}])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_window_requires_use_sliding_window_and_sliding_window(name: str, change: dict[str, Any]) -> None:
    config = families()[name].config_from_hf({"max_window_layers": 0} | change)[0]
    assert all(block.attention.window is None for block in config.stacks["decoder"].blocks)
