"""CodeGen: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_codegen_matches_transformers(seed: int, tmp_path: Path) -> None:
    r = rng(seed)
    heads = r.choice([4, 8])
    config = transformers.CodeGenConfig(
        vocab_size=r.choice([61, 97, 130]),
        n_positions=64,
        n_embd=heads * r.choice([4, 8]),
        n_layer=r.choice([1, 2, 3]),
        n_head=heads,
        rotary_dim=r.choice([2, 4]),
        n_inner=r.choice([None, 30]),
        activation_function=r.choice(["gelu_new", "gelu"]),
        layer_norm_epsilon=r.choice([1e-5, 1e-3]),
        bos_token_id=1,
        eos_token_id=None,
    )
    check_family(PeerModel(config, long_seq_len=40), tmp_path, seed)


def test_heads_that_four_does_not_divide_are_an_error() -> None:
    with pytest.raises(ConfigError, match="n_head"):
        ct.config({"model_type": "codegen", "n_head": 6, "n_embd": 36, "rotary_dim": 4})
