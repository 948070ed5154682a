"""Heads of tasks: pooling, padding, dropout, choices, initialization, and inputs that they reject."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.config_strategies import (
    SEEDS,
    SEQ_LEN,
    build_randomized_model,
    configs,
    random_tokens,
    task_heads,
    tolerance,
)
from torch import Tensor

import cutaway as ct
from cutaway import config as c
from cutaway.errors import ConfigError, InputError

TANH = c.HeadTransform(activation="tanh")


def padded_batch(config: c.Config, seed: int) -> tuple[Tensor, Tensor]:
    """Random rows of different lengths: without padding, padded on the right, on the left, and on both sides."""
    tokens = random_tokens(config, 4, SEQ_LEN, seed)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, SEQ_LEN // 2 :] = False
    mask[2, : SEQ_LEN // 3] = False
    mask[3, :2] = mask[3, -3:] = False
    return tokens, mask


@given(config=configs(forms=("encoder", "decoder"), heads=("task",)), seed=SEEDS)
def test_padded_rows_have_the_output_of_the_row_alone(config: c.Config, seed: int) -> None:
    model: Any = build_randomized_model(config, seed=seed)
    tokens, mask = padded_batch(config, seed)
    if config.head.kind == "multiple-choice":
        output = model(tokens.view(2, 2, SEQ_LEN), mask.view(2, 2, SEQ_LEN)).view(4)
        alone = [model(tokens[i : i + 1, None, mask[i]])[0, 0] for i in range(4)]
    else:
        output = model(tokens, mask)
        alone = [model(tokens[i : i + 1, mask[i]])[0] for i in range(4)]
    for i in range(4):
        row = output[i, mask[i]] if config.head.kind == "token-classification" else output[i]
        assert row.shape == alone[i].shape
        assert (row - alone[i]).abs().max() <= tolerance(model.dtype, alone[i])


@given(config=configs(forms=("encoder-decoder",)), pooling=st.sampled_from(["first", "last", "mean"]), seed=SEEDS)
def test_encoder_decoder_pools_the_target(config: c.Config, pooling: Any, seed: int) -> None:
    model: Any = build_randomized_model(config.replace(head=c.SequenceClassificationHead(pooling=pooling)), seed=seed)
    source, source_mask = padded_batch(config.replace(vocab_size=min(config.vocab_size, 7)), seed)
    source = source % (config.source_vocab_size or config.vocab_size)
    target, target_mask = padded_batch(config, seed + 1)
    output = model(source, target, source_mask, target_mask)
    for i in range(4):
        alone = model(source[i : i + 1, source_mask[i]], target[i : i + 1, target_mask[i]])[0]
        assert (output[i] - alone).abs().max() <= tolerance(model.dtype, alone)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("first", [3.0, -1.0]), ("last", [1.0, 5.0]), ("mean", [2.0, 2.0]), ("max", [3.0, 5.0])],
)
def test_pooling_leaves_out_padding(pooling: str, expected: list[float]) -> None:
    from cutaway.model.head import pool

    x = torch.tensor([[[9.0, 9.0], [3.0, -1.0], [1.0, 5.0], [-9.0, 9.0]]])
    mask = torch.tensor([[False, True, True, False]])
    assert pool(x, mask, pooling).tolist() == [expected]
    assert torch.equal(pool(x[:, 1:3], None, pooling), pool(x, mask, pooling))


@pytest.mark.parametrize("pooling", ["first", "last", "mean", "max"])
def test_row_of_padding_only_is_finite(pooling: Any) -> None:
    """Rows of padding only occur where batches have a fixed size."""
    model = ct.build(ct.config("tiny-bert").replace(head=c.EmbeddingHead(pooling=pooling)), seed=0)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1] = False
    embeddings = model(torch.randint(0, 100, (2, 4)), mask)
    assert torch.isfinite(embeddings).all()


def test_classification_equals_its_equation() -> None:
    head = c.SequenceClassificationHead(num_labels=3, transform=c.HeadTransform(activation="tanh", norm=c.LayerNorm()))
    model: Any = build_randomized_model(ct.config("tiny-bert").replace(head=head))
    tokens = torch.randint(0, 100, (2, 6))
    h = model.encode(tokens)[:, 0]
    weights = model.head.transform
    x = torch.tanh(h @ weights.dense.weight.T + weights.dense.bias)
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = x * weights.norm.weight + weights.norm.bias
    expected = x @ model.head.classifier.weight.T + model.head.classifier.bias
    torch.testing.assert_close(model(tokens), expected)


def test_embeddings_have_norm_one_and_the_dimension_of_the_projection() -> None:
    head = c.EmbeddingHead(projection=c.EmbeddingProjection(dim=5, activation="tanh"))
    model: Any = build_randomized_model(ct.config("tiny-bert").replace(head=head))
    tokens = torch.randint(0, 100, (3, 6))
    embeddings = model(tokens)
    assert embeddings.shape == (3, 5) == (3, head.dim(model.config.d_model))
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(3))
    projection = model.head.projection
    x = torch.tanh(model.encode(tokens).mean(1) @ projection.weight.T + projection.bias)
    torch.testing.assert_close(embeddings, x / x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("where", ["dropout", "transform.dropout"])
def test_head_dropout_acts_only_in_training(where: str) -> None:
    config = ct.config("tiny-bert").replace(
        {
            "encoder.dropout": 0.0,
            "encoder.embedding.dropout": 0.0,
            "encoder.block.attention.dropout": 0.0,
            "head": c.SequenceClassificationHead(transform=TANH).replace({where: 0.5}),
        }
    )
    model = build_randomized_model(config)
    tokens = torch.randint(0, 100, (2, 6))
    assert torch.equal(model(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


def test_scores_of_choices_do_not_depend_on_other_choices() -> None:
    model = build_randomized_model(ct.config("tiny-bert").replace(head=c.MultipleChoiceHead(transform=TANH)))
    tokens = torch.randint(0, 100, (2, 3, 6))
    types = torch.randint(0, 2, tokens.shape)
    scores = model(tokens, token_types=types)
    assert scores.shape == (2, 3)
    torch.testing.assert_close(model(tokens[:, 1:], token_types=types[:, 1:]), scores[:, 1:])


def test_new_heads_are_initialized_like_other_matrices() -> None:
    head = c.SequenceClassificationHead(num_labels=400, transform=TANH)
    model: Any = ct.build(ct.config("tiny-bert").replace(d_model=64, head=head), seed=0)
    for linear in (model.head.classifier, model.head.transform.dense):
        assert float(linear.weight.std()) == pytest.approx(0.02, rel=0.05)
        assert not linear.bias.any()


@given(head=task_heads())
def test_heads_survive_toml_and_json(head: Any) -> None:
    config = ct.config("tiny-bert").replace(head=head)
    assert ct.config(c.to_dict(config)) == config


def test_label_names() -> None:
    assert c.TokenClassificationHead(num_labels=2).label_names == ("LABEL_0", "LABEL_1")
    head = c.SequenceClassificationHead(labels=("ham", "spam", "other"))
    assert (head.num_labels, head.label_names) == (3, ("ham", "spam", "other"))


@pytest.mark.parametrize(
    ("preset", "head", "message"),
    [
        ("tiny-bert", {"kind": "sequence-classification", "num_labels": 3, "labels": ["a"]}, "labels has 1 names"),
        ("tiny-llama", {"kind": "multiple-choice"}, "is not for decoders; use kind 'lm' or 'sequence-classification'"),
        ("tiny-llama", {"kind": "none"}, "is not for decoders"),
        ("tiny-bert", {"kind": "token-classification", "pooling": "mean"}, "unknown key 'pooling'"),
        ("tiny-bert", {"kind": "classification"}, "unknown kind 'classification'; allowed here: .*sequence-class"),
    ],
)
def test_heads_that_do_not_fit_are_rejected(preset: str, head: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ct.config(c.to_dict(ct.config(preset)) | {"head": head})


@pytest.mark.unchecked
def test_inputs_that_heads_reject() -> None:
    tokens = torch.randint(0, 100, (2, 6))
    classifier = ct.build(ct.config("tiny-llama").replace(head=c.SequenceClassificationHead(pooling="last")), seed=0)
    with pytest.raises(InputError, match="a cache was passed, but a SequenceClassificationHead pools all tokens"):
        classifier(tokens, cache=classifier.new_cache(2, 8))
    with pytest.raises(InputError, match=r"document_ids were passed, .* has one output per row"):
        classifier(tokens, document_ids=torch.zeros_like(tokens))
    with pytest.raises(InputError, match="kind 'sequence-classification', so it computes no logits of tokens"):
        _ = classifier.lm_head
    choices = ct.build(ct.config("tiny-bert").replace(head=c.MultipleChoiceHead()), seed=0)
    with pytest.raises(InputError, match=r"tokens has shape \(2, 6\); .* needs \(batch, choices, length\)"):
        choices(tokens)
