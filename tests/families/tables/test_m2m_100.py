"""M2M100 and NLLB: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from support.family_configs import bart_peer, random_bart_config
from support.family_parity import check_extra_tensors, check_family


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_m2m_100_matches_transformers(seed: int, tmp_path: Path) -> None:
    """pad_token_id shifts the positions; sequences may be longer than max_position_embeddings."""
    settings = random_bart_config(seed, pad_token_id=[1, 0, 3, 1][seed % 4], max_position_embeddings=[40, 24][seed % 2])
    config = transformers.M2M100Config(**settings, encoder_layerdrop=0.05, decoder_layerdrop=0.0)
    check_family(bart_peer(config), tmp_path, seed)


def test_file_with_stored_positions_loads(tmp_path: Path) -> None:
    """Files of older versions of transformers have the sinusoidal positions."""
    config = transformers.M2M100Config(**random_bart_config(1))
    stored = torch.zeros(config.max_position_embeddings + 2, config.d_model)
    extra = {f"model.{side}.embed_positions.weights": stored.clone() for side in ("encoder", "decoder")}
    check_extra_tensors(
        transformers.M2M100ForConditionalGeneration(config), tmp_path, extra, transformers.AutoModelForSeq2SeqLM
    )
