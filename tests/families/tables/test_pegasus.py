"""Pegasus: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import bart_peer, random_bart_config
from support.family_parity import check_family


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_pegasus_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(bart_peer(transformers.PegasusConfig(**random_bart_config(seed))), tmp_path, seed)
