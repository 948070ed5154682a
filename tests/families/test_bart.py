"""BART: fields and rows against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from family_parity import Peer, check_family, rng

import cutaway as ct
from cutaway.errors import ConfigError


def kin(seed: int, **given: Any) -> dict[str, Any]:
    """Settings that BART and its kin have in common, drawn at random; the stacks differ in all they can differ in."""
    r = rng(seed)
    heads = r.choice([(1, 2), (2, 4), (3, 1), (4, 3)])
    encoder = r.choice([1, 2, 3])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "d_model": 12 * r.choice([2, 3]),
        "encoder_layers": encoder,
        "decoder_layers": r.choice([n for n in (1, 2, 3) if n <= encoder or seed > 5]),
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": r.choice([24, 50]),
        "decoder_ffn_dim": r.choice([24, 40]),
        "max_position_embeddings": 40,
        "activation_function": ["gelu", "relu", "silu", "gelu_pytorch_tanh"][seed % 4],
        "dropout": r.choice([0.0, 0.1]),
        "attention_dropout": r.choice([0.0, 0.1]),
        "activation_dropout": r.choice([0.0, 0.1]),
        "scale_embedding": r.random() < 0.5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    } | given


def peer(config: Any) -> Peer:
    """Positions count from the start of a row, so padding is on the right; and see Peer.greedy."""
    deeper = config.decoder_layers > config.encoder_layers
    return Peer(config, transformers.AutoModelForSeq2SeqLM, long=40, left=False, greedy=not deeper)


@pytest.mark.parametrize("seed", range(8))
def test_bart_is_the_peers(seed: int, tmp_path: Path) -> None:
    check_family(peer(transformers.BartConfig(**kin(seed))), tmp_path, seed)


@pytest.mark.parametrize("name", ["bart", "pegasus", "marian"])
def test_a_table_that_may_or_may_not_be_shared_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        ct.config({"model_type": name, "tie_word_embeddings": False})
