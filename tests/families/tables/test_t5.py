"""T5: config fields and weight mappings against transformers."""

from pathlib import Path

import pytest
import transformers
from support.family_configs import FEED_FORWARD_PROJS, can_peer_generate, random_t5_config, untie_lm_head
from support.family_parity import PeerModel, check_family

import cutaway as ct
from cutaway.errors import ConfigError


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_t5_matches_transformers(seed: int, tmp_path: Path) -> None:
    scaled = seed % 4 in (0, 3)
    config = transformers.T5Config(
        **random_t5_config(seed, feed_forward_proj=FEED_FORWARD_PROJS[seed], tie_word_embeddings=scaled)
    )
    untied = seed % 4 in (1, 3)
    peer = PeerModel(
        config,
        transformers.AutoModelForSeq2SeqLM,
        long_seq_len=180,
        modify_model=untie_lm_head if untied else None,
        compare_generate=can_peer_generate(config),
    )
    loaded = check_family(peer, tmp_path, seed)
    assert loaded.config.head.tied != untied
    assert (loaded.config.head.scale != 1.0) == scaled


def test_question_answering_is_rejected(tmp_path: Path) -> None:
    config = transformers.T5Config(**random_t5_config(1, num_decoder_layers=1))
    transformers.T5ForQuestionAnswering(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a T5ForQuestionAnswering, whose head cutaway does not have; supported"):
        ct.load(tmp_path)
