"""Qwen2: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from family_parity import Peer, check_family, rng
from test_mistral import some_without_head_dim

from cutaway.families import families

WINDOWS: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 3},
    {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "num_hidden_layers": 2},
    {"sliding_window": 4, "num_hidden_layers": 2},
    {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "max_window_layers": 0,
        "num_hidden_layers": 4,
    },
    {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1, "num_hidden_layers": 2},
    {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2, "num_hidden_layers": 3},
    {"use_sliding_window": False, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2},
]


@pytest.mark.parametrize("seed", range(8))
def test_qwen2_is_the_peers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = some_without_head_dim(
        seed,
        hidden_act=r.choice(["silu", "gelu_pytorch_tanh"]),
        attention_dropout=r.choice([0.0, 0.1]),
        **WINDOWS[seed],
    )
    check_family(Peer(transformers.Qwen2Config(**settings), long=40), tmp_path, seed)


@pytest.mark.parametrize("given", [{"use_sliding_window": True, "sliding_window": None}, {"sliding_window": 8}])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_window_needs_both_its_switch_and_its_width(name: str, given: dict[str, Any]) -> None:
    config = families()[name].read({"max_window_layers": 0} | given)[0]
    assert all(block.attention.window is None for block in config.stacks["decoder"].blocks)
