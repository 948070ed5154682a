"""ALBERT: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


def settings(seed: int, **overrides: Any) -> Any:
    """Numbers of groups that divide the layers or not; an untied head requires embedding_size = hidden_size.

    `inner_group_num` is the number of layers of a group.
    """
    r = rng(seed)
    config = random_bert_config(seed, hidden_act=["gelu_new", "gelu", "relu"][seed % 3])
    layers, groups, inner = [(4, 1, 1), (5, 2, 1), (4, 3, 1), (2, 2, 2), (2, 1, 3), (1, 1, 2), (3, 2, 2), (2, 1, 2)][
        seed
    ]
    tied = config["tie_word_embeddings"]
    sizes = {"embedding_size": r.choice([10, 14]) if tied else config["hidden_size"]}
    config |= sizes | {"num_hidden_layers": layers, "num_hidden_groups": groups, "bos_token_id": 2, "eos_token_id": 3}
    config["inner_group_num"] = inner
    return transformers.AlbertConfig(**config | overrides)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_albert_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = settings(seed)
    unused = () if config.tie_word_embeddings else ("predictions.bias",)
    check_family(
        PeerModel(config, transformers.AutoModelForMaskedLM, long_seq_len=40, unused_parameters=unused), tmp_path, seed
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_albert_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(settings(seed, tie_word_embeddings=True), transformers.AutoModel, long_seq_len=40), tmp_path, seed
    )


def test_untied_head_with_factorized_embedding_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config({"model_type": "albert", "tie_word_embeddings": False})
