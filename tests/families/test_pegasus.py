"""Pegasus: fields and rows against transformers."""

from pathlib import Path

import pytest
import transformers
from families.test_bart import kin, peer
from family_parity import check_family


@pytest.mark.parametrize("seed", range(8))
def test_pegasus_is_the_peers(seed: int, tmp_path: Path) -> None:
    check_family(peer(transformers.PegasusConfig(**kin(seed))), tmp_path, seed)
