"""BERT: fields and rows against transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_parity import Peer, check_family, rng
from safetensors.torch import load_file, save_file

import cutaway as ct


def kin(seed: int, **given: Any) -> dict[str, Any]:
    """Settings that BERT and its kin have in common, drawn at random."""
    r = rng(seed)
    heads = r.choice([1, 2, 3, 4])
    return {
        "vocab_size": r.choice([61, 97, 130]),
        "hidden_size": heads * r.choice([5, 8] if heads > 1 else [15, 20]),
        "num_hidden_layers": r.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": r.choice([24, 50]),
        "hidden_act": ["gelu", "gelu_pytorch_tanh", "relu", "silu"][seed % 4],
        "layer_norm_eps": r.choice([1e-12, 1e-5, 1e-3]),
        "max_position_embeddings": r.choice([40, 44]),
        "type_vocab_size": r.choice([1, 2, 3]),
        "hidden_dropout_prob": r.choice([0.0, 0.1]),
        "attention_probs_dropout_prob": r.choice([0.0, 0.2]),
        "tie_word_embeddings": seed % 3 != 0,
        "pad_token_id": 0,
    } | given


@pytest.mark.parametrize("seed", range(8))
def test_bert_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**kin(seed))
    # Untied, the peer keeps a second bias in the head that nothing reads.
    dead = () if config.tie_word_embeddings else ("cls.predictions.bias",)
    check_family(Peer(config, transformers.AutoModelForMaskedLM, long=40, dead=dead), tmp_path, seed)


@pytest.mark.parametrize("seed", range(8))
def test_bert_without_its_head_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**kin(seed, tie_word_embeddings=True))
    check_family(Peer(config, transformers.AutoModel, long=40), tmp_path, seed)


def test_an_older_file_with_all_its_heads_is_read(tmp_path: Path) -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(**kin(1))).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): tensor for name, tensor in stored.items()}
    old = {re.sub("LayerNorm.bias$", "LayerNorm.beta", name): tensor for name, tensor in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    ours: Any = ct.load(tmp_path)
    assert set(ours.report.ignored) == {
        "bert.embeddings.position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias",
    }  # fmt: skip
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), model(tokens).prediction_logits)
        torch.testing.assert_close(ours.model.pool(tokens), model.bert(tokens).pooler_output)
