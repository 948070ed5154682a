"""GLM-4-0414: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config, set_partial_rotary_factor
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_glm4_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(
        seed,
        attention_bias=r.random() < 0.5,
        attention_dropout=r.choice([0.0, 0.1]),
        hidden_act=r.choice(["silu", "gelu"]),
    )
    set_partial_rotary_factor(settings, settings["head_dim"], seed)
    check_family(PeerModel(transformers.Glm4Config(**settings), long_seq_len=40), tmp_path, seed)
