"""Attention, logit attribution and head-type queries equal the library."""

import re
from contextlib import nullcontext

import pytest
import torch
from support.inspector import open_inspector, random_token_ids, run_query

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.analysis import attention_entropy, direct_logit_attribution, head_scores
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.queries.attention import THUMBNAIL_SIZE

pytestmark = pytest.mark.unchecked

SINGLE_STACK_MODELS = (
    "tiny-gpt",
    "tiny-llama",
    "tiny-gemma",
    "tiny-mla",
    "tiny-bert",
    "tiny-modernbert",
    "tiny-albert",
)


def trace_patterns(
    inspector: Inspector, tokens: list[int], source: list[int] | None = None, **edits: object
) -> ct.trace:
    with ct.trace(inspector.model, "attn.pattern", *([] if source is None else ["cross.pattern"])) as t:
        args = [torch.tensor([x]) for x in (source, tokens) if x is not None]
        with torch.no_grad():
            inspector.model.encode(*args) if "decoder" not in inspector.model.stacks else inspector.model(*args)
    return t


@pytest.mark.parametrize("name", SINGLE_STACK_MODELS)
def test_patterns_equal_trace(name: str) -> None:
    inspector = open_inspector(name)
    tokens = random_token_ids(20, inspector.config.vocab_size)
    t, model_input = trace_patterns(inspector, tokens), {"tokens": tokens}
    entropies = attention_entropy(inspector.model, tokens)
    layers = run_query(inspector, "attention_layers")[0]["layers"]
    assert len(layers) == len(next(iter(inspector.model.stacks.values())).blocks)
    for index, layer in enumerate(layers):
        full = t[f"{layer['name']}.pattern"][0]
        _, tensors = run_query(inspector, "attention_thumbnails", input=model_input, attention=layer["name"])
        torch.testing.assert_close(tensors["thumbnails"], full.as_subclass(torch.Tensor))
        torch.testing.assert_close(tensors["entropy"], entropies.values[index])
        assert layer["heads"] == len(full)
        for head in (0, layer["heads"] - 1):
            data, head_tensors = run_query(
                inspector, "attention_head", input=model_input, attention=layer["name"], head=head
            )
            torch.testing.assert_close(head_tensors["pattern"], full[head].as_subclass(torch.Tensor))
            assert data["mean_entropy"] == pytest.approx(float(entropies.values[index, head]), abs=1e-5)
            _, row = run_query(
                inspector, "attention_row", input=model_input, attention=layer["name"], head=head, position=7
            )
            assert torch.equal(row["weights"], head_tensors["pattern"][7])


def test_patterns_of_an_encoder_decoder_equal_trace() -> None:
    inspector = open_inspector("tiny-t5")
    source, tokens = random_token_ids(9, 50), random_token_ids(6, 50, 1)
    t, model_input = trace_patterns(inspector, tokens, source), {"tokens": tokens, "source": source}
    for layer in run_query(inspector, "attention_layers")[0]["layers"]:
        data, tensors = run_query(inspector, "attention_thumbnails", input=model_input, attention=layer["name"])
        torch.testing.assert_close(tensors["thumbnails"], t[f"{layer['name']}.pattern"][0].as_subclass(torch.Tensor))
        num_queries = 9 if layer["stack"] == "encoder" else 6
        assert data["shape"] == [num_queries, 6 if layer["is_causal"] else 9]


def test_visible_equals_the_sliding_window_mask() -> None:
    inspector = open_inspector("tiny-gemma")
    layers = run_query(inspector, "attention_layers")[0]["layers"]
    windowed = next(layer for layer in layers if layer["window"] is not None)
    tokens = random_token_ids(windowed["window"] + 8, inspector.config.vocab_size)
    _, tensors = run_query(inspector, "attention_head", input={"tokens": tokens}, attention=windowed["name"], head=0)
    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    assert torch.equal(tensors["visible"].bool(), (distance >= 0) & (distance < windowed["window"]))


def test_thumbnails_of_long_texts_are_max_pooled() -> None:
    inspector = open_inspector("tiny-llama")
    tokens = random_token_ids(100, inspector.config.vocab_size)
    _, tensors = run_query(inspector, "attention_thumbnails", input={"tokens": tokens}, attention="blocks.1.attn")
    full = trace_patterns(inspector, tokens)["blocks.1.attn.pattern"][0].as_subclass(torch.Tensor)
    assert tensors["thumbnails"].shape == (4, THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    assert torch.equal(tensors["thumbnails"].amax((1, 2)), full.amax((1, 2)))
    assert not tensors["visible"][0, -1]
    assert tensors["visible"].diagonal().all()


def test_sink_weight_and_pattern_sum_to_one() -> None:
    config = ct.config("tiny-gpt").model_dump(mode="json")
    config["decoder"]["block"][0]["attention"]["sink"] = True
    model = ct.build(config, seed=0)
    inspector = Inspector(model, TokenizerAdapter(model.config.vocab_size))
    _, tensors = run_query(
        inspector, "attention_head", input={"tokens": [1, 2, 3, 4]}, attention="blocks.0.attn", head=1
    )
    torch.testing.assert_close(tensors["sink_weight"] + tensors["pattern"].sum(-1), torch.ones(4))
    assert (tensors["sink_weight"] > 0).all()
    assert run_query(inspector, "attention_layers")[0]["layers"][0]["has_sink"]


@pytest.mark.parametrize("site", ["pattern", "scores", "z"])
def test_edited_patterns_equal_trace(site: str) -> None:
    inspector = open_inspector("tiny-gpt")
    edits = {f"blocks.0.attn.{site}": {"do": "scale", "value": 0.5, "heads": [1]}}
    tokens = random_token_ids(9, 100)
    with ct.edit(inspector.model, edits):
        t = trace_patterns(inspector, tokens)
    for layer in (0, 1):
        for head in (0, 1):
            params = {"input": {"tokens": tokens, "edits": edits}, "attention": f"blocks.{layer}.attn", "head": head}
            pattern = run_query(inspector, "attention_head", **params)[1]["pattern"]
            torch.testing.assert_close(pattern, t[f"blocks.{layer}.attn.pattern"][0, head].as_subclass(torch.Tensor))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama", "tiny-t5"])
@pytest.mark.parametrize("edits", [{}, {"*blocks.1.ffn.out": "zero"}])
def test_logit_attribution_equals_direct_logit_attribution(name: str, edits: dict[str, str]) -> None:
    inspector = open_inspector(name)
    tokens, source = random_token_ids(8, 50), random_token_ids(5, 50, 1) if name == "tiny-t5" else None
    model_input = {"tokens": tokens, "edits": edits} | ({} if source is None else {"source": source})
    for token in (None, 7):
        data, _ = run_query(inspector, "logit_attribution", input=model_input, position=5, token=token)
        if edits:
            with ct.edit(inspector.model, edits):
                attribution = direct_logit_attribution(
                    inspector.model, tokens, token, position=5, source=source, by_head=True
                )
        else:
            attribution = direct_logit_attribution(
                inspector.model, tokens, token, position=5, source=source, by_head=True
            )
        actual = [contribution for row in data["heads"].values() for contribution in row]
        expected = [
            float(v) for label, v in zip(attribution.labels[0], attribution.values, strict=True) if label[-1].isdigit()
        ]
        assert sorted(actual) == pytest.approx(sorted(expected), abs=1e-5)
        assert data["attribution_sum"] == pytest.approx(float(attribution.values.sum()), abs=1e-4)
        assert data["attribution_sum"] == pytest.approx(data["logit"], abs=1e-3)
        attention = "decoder.blocks.1.cross" if source else "blocks.1.attn"
        label = "1.cross.2" if source else "1.attn.2"
        assert data["heads"][attention][2] == pytest.approx(float(attribution.select(component=label)), abs=1e-5)


@torch.no_grad()
def test_attention_by_layer_equals_trace_and_a_skipped_block_has_no_weights() -> None:
    inspector = open_inspector("tiny-english")
    tokens = inspector.tokenizer.encode("The cat sat on the")
    for edits in ({}, {"blocks.3": "skip"}):
        model_input = {"tokens": tokens, "edits": edits}
        _, tensors = run_query(inspector, "attention_by_layer", input=model_input, position=2)
        kept = [layer for layer in range(6) if f"blocks.{layer}" not in edits]
        patterns = [f"blocks.{layer}.attn.pattern" for layer in kept]
        edited = ct.edit(inspector.model, edits) if edits else nullcontext()
        with edited, ct.trace(inspector.model, *patterns) as t:
            inspector.model(torch.tensor([tokens]))
        expected = torch.zeros(6, len(tokens))
        for layer in kept:
            expected[layer] = t[f"blocks.{layer}.attn.pattern"].as_subclass(torch.Tensor)[0, :, 2].mean(0)
        torch.testing.assert_close(tensors["attn"], expected)


def test_head_types_equal_head_scores() -> None:
    inspector = open_inspector("tiny-llama")
    data, tensors = run_query(inspector, "head_types")
    assert torch.equal(tensors["scores"], head_scores(inspector.model, batch_size=4).values)
    assert data["head_types"] == ["previous_token", "duplicate_token", "induction", "first_token"]
    assert data["attention_names"][1] == "blocks.1.attn"


def test_invalid_query_is_an_error() -> None:
    inspector = open_inspector("tiny-gpt")
    model_input = {"tokens": [1, 2, 3]}
    with pytest.raises(InputError, match="not an attention of this model"):
        run_query(inspector, "attention_thumbnails", input=model_input, attention="blocks.9.attn")
    with pytest.raises(InputError, match="heads 0 to 3"):
        run_query(inspector, "attention_head", input=model_input, attention="blocks.0.attn", head=4)
    with pytest.raises(InputError, match="3 tokens"):
        run_query(inspector, "logit_attribution", input=model_input, position=3)
    with pytest.raises(InputError, match="use ids 0 to"):
        run_query(inspector, "logit_attribution", input=model_input, position=0, token=10**6)
    with pytest.raises(InputError, match="skipped by the edits"):
        run_query(
            inspector,
            "attention_thumbnails",
            input=model_input | {"edits": {"blocks.0": "skip"}},
            attention="blocks.0.attn",
        )
    with pytest.raises(InputError, match="post-norm"):
        run_query(open_inspector("tiny-bert"), "logit_attribution", input=model_input, position=0)


def test_model_info_has_the_error_of_logit_attribution() -> None:
    for name in ("tiny-python", "tiny-dates", "tiny-english-encoder", "tiny-bert", "tiny-t5"):
        inspector = open_inspector(name)
        error = run_query(inspector, "model_info")[0]["attribution_error"]
        source = {"source": [1, 2]} if len(inspector.model.stacks) > 1 else {}
        expected = nullcontext() if error is None else pytest.raises(InputError, match=re.escape(error))
        with expected:
            run_query(inspector, "logit_attribution", input={"tokens": [1, 2], **source}, position=0)
