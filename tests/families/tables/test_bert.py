"""BERT: fields and rows against transformers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.family_configs import random_bert_config
from support.family_parity import PeerModel, check_family

import cutaway as ct


@pytest.mark.parametrize("seed", range(8))
def test_bert_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**random_bert_config(seed))
    # Untied, the peer keeps a second bias in the head that nothing reads.
    dead = () if config.tie_word_embeddings else ("cls.predictions.bias",)
    check_family(
        PeerModel(config, transformers.AutoModelForMaskedLM, long_seq_len=40, unused_parameters=dead), tmp_path, seed
    )


@pytest.mark.parametrize("seed", range(8))
def test_bert_without_its_head_is_the_peers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**random_bert_config(seed, tie_word_embeddings=True))
    check_family(PeerModel(config, transformers.AutoModel, long_seq_len=40), tmp_path, seed)


def test_an_older_file_with_all_its_heads_is_read(tmp_path: Path) -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(**random_bert_config(1))).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): tensor for name, tensor in stored.items()}
    old = {re.sub("LayerNorm.bias$", "LayerNorm.beta", name): tensor for name, tensor in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    ours: Any = ct.load(tmp_path)
    assert set(ours.load_report.ignored_weights) == {
        "bert.embeddings.position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias",
    }  # fmt: skip
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), model(tokens).prediction_logits)
        torch.testing.assert_close(ours.model.pool(tokens), model.bert(tokens).pooler_output)
