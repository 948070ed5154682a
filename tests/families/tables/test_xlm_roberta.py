"""XLM-R: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import random_roberta_config, roberta_peer
from support.family_parity import check_family


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_xlm_roberta_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.XLMRobertaConfig(**random_roberta_config(seed))
    check_family(roberta_peer(config, transformers.AutoModelForMaskedLM), tmp_path, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_xlm_roberta_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.XLMRobertaConfig(**random_roberta_config(seed, tie_word_embeddings=True))
    check_family(roberta_peer(config, transformers.AutoModel), tmp_path, seed)
