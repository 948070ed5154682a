"""Mixtral: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_config_optional_head_dim
from support.family_parity import PeerModel, check_family, rng

from cutaway.errors import ConfigError
from cutaway.families import families


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_mixtral_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    experts = r.choice([1, 3, 4, 5])
    settings = random_config_optional_head_dim(
        seed,
        num_local_experts=experts,
        num_experts_per_tok=r.randint(1, experts),
        sliding_window=[None, 3, None, 2, 64, None, 5, 13][seed],
        experts_implementation="eager",  # the default implementation rejects odd dimensions
        hidden_act=r.choice(["silu", "gelu"]),
        attention_dropout=r.choice([0.0, 0.1]),
    )
    check_family(PeerModel(transformers.MixtralConfig(**settings), long_seq_len=40), tmp_path, seed)


def test_router_jitter_noise_is_an_error() -> None:
    with pytest.raises(ConfigError, match="router_jitter_noise"):
        families()["mixtral"].config_from_hf({"router_jitter_noise": 0.01})


def test_per_layer_windows_are_an_error() -> None:
    """transformers has one window for all layers and ignores `layer_types`."""
    family = families()["mixtral"]
    config = family.config_from_hf({"num_hidden_layers": 2})[0]
    (full,) = config.decoder.block
    sliding = full.replace(attention=full.attention.replace(window=8))
    with pytest.raises(ConfigError, match="window differs between layers"):
        family.config_to_hf(config.replace(decoder=config.decoder.replace(block=(sliding, full))))
