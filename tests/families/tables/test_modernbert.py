"""ModernBERT: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_configs import ROPE_SCALINGS
from support.family_parity import PeerModel, check_family, rng

import cutaway as ct
from cutaway.config import Rope


def random_rope_parameters(seed: int, theta: float, pairs: int) -> dict[str, Any]:
    r = rng(seed)
    scaling = dict(ROPE_SCALINGS[seed % len(ROPE_SCALINGS)], rope_theta=theta)
    scaling.pop("truncate", None)  # transformers reads it from the wrong level, so it has no effect there
    if scaling["rope_type"] == "longrope":
        scaling["short_factor"] = [round(r.uniform(1, 2), 2) for _ in range(pairs)]
        scaling["long_factor"] = [round(r.uniform(2, 6), 2) for _ in range(pairs)]
    return scaling


def settings(seed: int, *, head: bool) -> Any:
    """Random config; keys of the head only if there is one."""
    r = rng(seed)
    heads, width, layers = r.choice([1, 2, 3]), r.choice([6, 8]), r.choice([2, 3, 4])
    layer_types = ["sliding_attention", *(r.choice(["full_attention", "sliding_attention"]) for _ in range(layers - 1))]
    dynamic = "dynamic" in (ROPE_SCALINGS[seed % 8]["rope_type"], ROPE_SCALINGS[(seed + 3) % 8]["rope_type"])
    head_settings = {
        "tie_word_embeddings": r.random() < 0.6,
        "decoder_bias": r.random() < 0.6,
        "classifier_bias": r.random() < 0.5,
        "classifier_activation": r.choice(["gelu", "silu"]),
    }
    return transformers.ModernBertConfig(
        vocab_size=r.choice([61, 97, 130]),
        hidden_size=heads * (width if heads > 1 else 16),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=r.choice([24, 50]),
        hidden_activation=r.choice(["gelu", "silu"]),
        max_position_embeddings=16 if dynamic else 64,
        norm_eps=r.choice([1e-5, 1e-3]),
        norm_bias=r.random() < 0.5,
        attention_bias=r.random() < 0.5,
        mlp_bias=r.random() < 0.5,
        attention_dropout=r.choice([0.0, 0.1]),
        embedding_dropout=r.choice([0.0, 0.1]),
        mlp_dropout=r.choice([0.0, 0.1]),
        layer_types=layer_types if seed % 2 else None,
        local_attention=r.choice([2, 4, 6, 8]),
        rope_parameters={
            "full_attention": random_rope_parameters(seed, 160000.0, (width if heads > 1 else 16) // 2),
            "sliding_attention": random_rope_parameters(seed + 3, 10000.0, (width if heads > 1 else 16) // 2),
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        **(head_settings if head else {}),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_modernbert_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(
        PeerModel(settings(seed, head=True), transformers.AutoModelForMaskedLM, long_seq_len=40), tmp_path, seed
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_modernbert_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(PeerModel(settings(seed, head=False), transformers.AutoModel, long_seq_len=40), tmp_path, seed)


def test_published_keys_are_read() -> None:
    published = {
        "model_type": "modernbert",
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 150000.0,
        "local_rope_theta": 20000.0,
        "local_attention": 128,
        "num_hidden_layers": 4,
        "position_embedding_type": "absolute",
    }
    blocks = ct.config(published).stacks["encoder"].blocks
    assert [block.attention.window for block in blocks] == [None, 65, 65, None]
    thetas = [block.attention.position.theta for block in blocks if isinstance(block.attention.position, Rope)]
    assert thetas == [150000.0, 20000.0, 20000.0, 150000.0]
