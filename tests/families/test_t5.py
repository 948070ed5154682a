"""T5: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_parity import Peer, check_family, check_stored, rng


def kin(seed: int, **given: Any) -> dict[str, Any]:
    """Settings that T5 and mT5 have in common, drawn at random."""
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "d_model": r.choice([16, 24, 30]),
        "d_kv": r.choice([3, 6, 8]),
        "d_ff": r.choice([24, 50]),
        "num_layers": r.choice([1, 2, 3]),
        "num_decoder_layers": r.choice([None, 1, 2]),
        "num_heads": heads,
        "relative_attention_num_buckets": r.choice([32, 12, 8]),
        "relative_attention_max_distance": r.choice([128, 40]),
        "layer_norm_epsilon": r.choice([1e-6, 1e-4]),
        "dropout_rate": r.choice([0.0, 0.1]),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    } | given


def generates(config: Any) -> bool:
    """The peer makes its cache as deep as the encoder, and runs out of layers where the decoder is deeper."""
    return bool(config.num_decoder_layers <= config.num_layers)


def untie(model: Any) -> None:
    """Published files of 1.1 and mT5 hold an output matrix of its own, which the peer makes only when it loads one."""
    noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(7))
    model.lm_head.weight = torch.nn.Parameter(noise * 0.3)


PROJECTIONS = ["relu", "gated-gelu", "gated-silu", "gelu", "gated-gelu", "relu", "gated-relu", "silu"]


@pytest.mark.parametrize("seed", range(8))
def test_t5_is_the_peers(seed: int, tmp_path: Path) -> None:
    scaled = seed % 4 in (0, 3)
    config = transformers.T5Config(**kin(seed, feed_forward_proj=PROJECTIONS[seed], tie_word_embeddings=scaled))
    apart = seed % 4 in (1, 3)
    how = {"long": 180, "tweak": untie if apart else None, "greedy": generates(config)}
    peer = Peer(config, transformers.AutoModelForSeq2SeqLM, **how)
    loaded = check_family(peer, tmp_path, seed)
    assert loaded.config.head.tied != apart
    assert (loaded.config.head.scale != 1.0) == scaled


def test_a_classifiers_file_holds_the_whole_model_one_level_down(tmp_path: Path) -> None:
    config = transformers.T5Config(**kin(1, num_decoder_layers=1))
    auto = transformers.AutoModelForSeq2SeqLM
    check_stored(transformers.T5ForSequenceClassification(config), tmp_path / "classifier", {}, auto)
    check_stored(transformers.T5ForQuestionAnswering(config), tmp_path / "answers", {}, auto)
