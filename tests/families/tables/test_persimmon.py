"""Persimmon: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_llama_config
from support.family_parity import PeerModel, check_family, rng


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_persimmon_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    settings = random_llama_config(seed, layer_norm_eps=r.choice([1e-5, 1e-3]), qk_layernorm=seed % 3 > 0)
    del settings["rms_norm_eps"], settings["num_key_value_heads"]
    head_dim = settings.pop("head_dim")
    settings["hidden_size"] = settings["num_attention_heads"] * head_dim
    rope_type = settings["rope_parameters"]["rope_type"]
    is_full = rope_type in ("longrope", "dynamic") or (head_dim // 2) % 2
    settings["rope_parameters"] |= {"partial_rotary_factor": 1.0 if is_full else 0.5}
    settings["hidden_act"] = r.choice(["relu2", "gelu"])
    check_family(PeerModel(transformers.PersimmonConfig(**settings), long_seq_len=40), tmp_path, seed)
