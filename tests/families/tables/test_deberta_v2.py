"""DeBERTa-v2 and v3: config fields and weight mappings against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family, check_legacy_config, randomize_weights, rng

import cutaway as ct
from cutaway.errors import ConfigError, KernelError
from cutaway.model.positions import Disentangled

TERMS = (["p2c", "c2p"], ["c2p"], ["p2c"], "c2p|p2c")
V3_BASE = {
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
"""config.json of microsoft/deberta-v3-base, without the keys of the tokenizer."""


def settings(seed: int, **overrides: Any) -> Any:
    """Every subset of the position scores, buckets and their absence, and text longer than the largest distance."""
    r, base = rng(seed), random_bert_config(seed, type_vocab_size=(0, 2, 3)[seed % 3])
    hidden_size, tied = base["hidden_size"], base["tie_word_embeddings"]
    relative = {
        "position_buckets": r.choice([-1, 6, 8, 9]),
        "max_relative_positions": r.choice([12, 30, -1]),
        "share_att_key": seed % 2 == 0,
        "norm_rel_ebd": "layer_norm" if seed % 3 else "none",
    }
    return transformers.DebertaV2Config(
        **base
        | {
            "relative_attention": seed != 7,
            "pos_att_type": TERMS[seed % 4],
            "position_biased_input": seed % 4 > 1,
            "embedding_size": r.choice([hidden_size, 12, 2 * hidden_size]) if tied else hidden_size,
        }
        | (relative if seed != 7 else {})
        | overrides
    )


def peer(config: Any, auto_class: Any) -> PeerModel:
    """Peer. An untied head of transformers has a second, unused bias."""
    unused = () if config.tie_word_embeddings else ("cls.predictions.bias",)
    return PeerModel(config, auto_class, long_seq_len=40, unused_parameters=unused)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
def test_deberta_v2_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(peer(settings(seed), transformers.AutoModelForMaskedLM), tmp_path, seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_deberta_v2_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    check_family(peer(settings(seed, tie_word_embeddings=True), transformers.AutoModel), tmp_path, seed)


def test_head_of_v3_files(tmp_path: Path) -> None:
    """The head `lm_predictions` is loaded whatever `legacy` is; the heads of the discriminator are ignored."""
    config = settings(1, legacy=False, tie_word_embeddings=True, embedding_size=random_bert_config(1)["hidden_size"])
    model = transformers.DebertaV2ForMaskedLM(config).eval()
    randomize_weights(model, 0)
    model.save_pretrained(tmp_path)
    extra = {
        "mask_predictions.classifier.weight": torch.ones(1, config.hidden_size),
        "deberta.embeddings.position_embeddings.weight": torch.ones(config.max_position_embeddings, config.hidden_size),
    }
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | extra, tmp_path / "model.safetensors")
    config_file = tmp_path / "config.json"
    config_file.write_text(config_file.read_text().replace('"legacy": false', '"legacy": true'))
    checkpoint: Any = ct.load(tmp_path)
    assert checkpoint.load_report.ignored_weights.keys() == extra.keys()
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(checkpoint.model(tokens), expected, rtol=1e-5, atol=1e-5)
        ct.save(checkpoint, tmp_path / "legacy")
        exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "legacy").eval()
        torch.testing.assert_close(exported(tokens).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_rows_match_transformers(seed: int) -> None:
    """Rows of relative positions up to 1,200, beyond every bucket, equal those of transformers."""
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    buckets, max_distance = ((256, 512), (32, 128), (7, 1000))[seed]
    position = (
        ct.config(
            {
                "form": "encoder",
                "vocab_size": 8,
                "d_model": 4,
                "encoder": {
                    "layers": 1,
                    "block": {
                        "attention": {
                            "heads": 1,
                            "position": {"kind": "disentangled", "buckets": buckets, "max_distance": max_distance},
                        }
                    },
                },
            }
        )
        .stacks["encoder"]
        .blocks[0]
        .attention.position
    )
    length = 1200
    states = torch.empty(1, 1, length, 1)
    expected = build_relative_position(states, states, buckets, max_distance)[0, :, [0, -1]] + buckets
    positions = torch.arange(length)
    relative = torch.stack((positions, positions - (length - 1)), -1)
    rows = Disentangled(position, 4).relative_position_row(relative)
    assert torch.equal(rows, expected.clamp(0, 2 * buckets - 1))


def test_published_config_equals_preset() -> None:
    check_legacy_config(V3_BASE | {"architectures": ["DebertaV2Model"]}, "deberta-v3-base")


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        ({"conv_kernel_size": 3}, "convolution"),
        ({"attention_head_size": 32}, "attention_head_size"),
        ({"tie_word_embeddings": False, "embedding_size": 128}, "untied head"),
        ({"relative_attention": True, "pos_att_type": ["c2p"], "position_buckets": 1}, "position_buckets|buckets"),
    ],
)
def test_unsupported_config_is_an_error(hf_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ct.config({"model_type": "deberta-v2"} | hf_config)


def test_kernel_without_position_scores_is_an_error() -> None:
    with pytest.raises(KernelError, match="does not support position scores; use one of: sdpa, explicit"):
        ct.build("deberta-v3-xsmall", device="meta").use_kernel("flex")
