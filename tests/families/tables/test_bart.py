"""BART: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import bart_peer, random_bart_config
from support.family_parity import check_family

import cutaway as ct
from cutaway.errors import ConfigError


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_bart_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(bart_peer(transformers.BartConfig(**random_bart_config(seed))), tmp_path, seed)


@pytest.mark.parametrize("name", ["bart", "pegasus", "marian"])
def test_untied_embeddings_are_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config({"model_type": name, "tie_word_embeddings": False})
