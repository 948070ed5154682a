"""BERT: config fields and weight mappings against transformers."""

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_bert_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**random_bert_config(seed))
    # If untied, the transformers model has a second, unused bias in the head.
    unused = () if config.tie_word_embeddings else ("cls.predictions.bias",)
    check_family(
        PeerModel(config, transformers.AutoModelForMaskedLM, long_seq_len=40, unused_parameters=unused), tmp_path, seed
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_bert_without_head_matches_transformers(seed: int, tmp_path: Path) -> None:
    config = transformers.BertConfig(**random_bert_config(seed, tie_word_embeddings=True))
    check_family(PeerModel(config, transformers.AutoModel, long_seq_len=40), tmp_path, seed)


def test_legacy_file_with_all_heads_loads(tmp_path: Path) -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(**random_bert_config(1))).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    legacy = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): tensor for name, tensor in stored.items()}
    legacy = {re.sub("LayerNorm.bias$", "LayerNorm.beta", name): tensor for name, tensor in legacy.items()}
    legacy["bert.embeddings.position_ids"] = torch.arange(40)[None]
    legacy["cls.predictions.decoder.weight"] = legacy["bert.embeddings.word_embeddings.weight"].clone()
    save_file(legacy, tmp_path / "model.safetensors")
    checkpoint: Any = ct.load(tmp_path)
    assert set(checkpoint.load_report.ignored_weights) == {
        "bert.embeddings.position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias",
    }  # fmt: skip
    tokens = torch.randint(5, 60, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(checkpoint.model(tokens), model(tokens).prediction_logits)
        torch.testing.assert_close(checkpoint.model.pool(tokens), model.bert(tokens).pooler_output)
