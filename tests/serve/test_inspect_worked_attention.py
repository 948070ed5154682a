"""Worked attention: each step equals the model's activations at the sites scores, pattern, z and out."""

from typing import Any

import pytest
import torch
from support.inspector import open_inspector, random_token_ids, run_query
from torch import Tensor

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens.sites import attention_module, get_blocks
from cutaway.model.attention import MultiHead
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter

pytestmark = pytest.mark.unchecked

NUM_TOKENS = 14


def build_inspector(name: str, **attention: Any) -> Inspector:
    """Inspector of a tiny preset, with changes of the attention config. Large weights make the scores differ."""
    config = ct.config(name).model_dump(mode="json")
    if attention:
        config["decoder"]["block"][0]["attention"] |= attention
    if attention.get("position"):
        config["decoder"]["embedding"]["position"] = {"kind": "none"}
    model = ct.build(config, seed=0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("q.weight", "k.weight", "v.weight", "sink")):
                parameter.mul_(8).add_(0.1)
    is_encoder_decoder = len(model.stacks) > 1
    return Inspector(model, TokenizerAdapter(model.config.vocab_size, None, 0 if is_encoder_decoder else None))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions": ("tiny-gpt", {}),
    "RoPE and GQA": ("tiny-llama", {}),
    "interleaved partial RoPE": (
        "tiny-llama",
        {"position": {"kind": "rope", "layout": "interleaved", "rotary_dim": 8}},
    ),
    "YaRN": (
        "tiny-llama",
        {"position": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 32}}},
    ),
    "ALiBi": ("tiny-gpt", {"position": {"kind": "alibi"}}),
    "ALiBi, softcap, window": ("tiny-gpt", {"position": {"kind": "alibi"}, "softcap": 3.0, "window": 5}),
    "sink": ("tiny-gpt", {"sink": True}),
    "scale": ("tiny-gpt", {"scale": 0.5}),
    "softcap and sliding window": ("tiny-gemma", {}),
    "latent attention": ("tiny-mla", {}),
    "bidirectional": ("tiny-bert", {}),
    "bidirectional, window, RoPE": ("tiny-modernbert", {}),
    "relative bias, cross-attention": ("tiny-t5", {}),
    "post-norm encoder-decoder": ("tiny-bart", {}),
}


def trace_attention(inspector: Inspector, model_input: dict[str, list[int]]) -> ct.trace:
    args = [torch.tensor([model_input[name]]) for name in ("source", "tokens") if name in model_input]
    sites = [name for name in inspector.sites if name.endswith((".scores", ".pattern", ".z", ".attn.in"))]
    with torch.no_grad(), ct.trace(inspector.model, *sites) as t:
        inspector.model(*args)
    return t


def plain(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_sites(name: str) -> None:
    preset, attention = MODELS[name]
    inspector = build_inspector(preset, **attention)
    model_input = {"tokens": random_token_ids(NUM_TOKENS, inspector.config.vocab_size)}
    if len(inspector.model.stacks) > 1:
        model_input["source"] = random_token_ids(9, inspector.config.vocab_size, 1)
    t = trace_attention(inspector, model_input)
    for layer in run_query(inspector, "attention_layers")[0]["layers"]:
        scores, pattern, z = (t[f"{layer['name']}.{site}"] for site in ("scores", "pattern", "z"))
        num_queries, num_keys = pattern.shape[-2:]
        for head, position, key in ((0, num_queries - 1, 2), (layer["heads"] - 1, 5, num_keys - 1), (1, 8, 7)):
            params = {"input": model_input, "attention": layer["name"], "head": head, "position": position, "key": key}
            data, tensors = run_query(inspector, "worked_attention", **params)
            expected_score = plain(scores)[0, head, position, key]
            row = plain(pattern)[0, head, position]
            steps = data["dot"] * data["scale"]
            assert float(tensors["q"] @ tensors["k"]) == pytest.approx(data["dot"], rel=1e-4, abs=1e-5)
            assert steps == pytest.approx(data["scaled"])
            if data["softcap"] is not None:
                steps = data["softcap"] * float(torch.tensor(steps / data["softcap"], dtype=torch.float64).tanh())
            steps += data["bias"] or 0.0
            assert steps == pytest.approx(data["score"])
            assert data["mask"]["is_visible"] == bool(expected_score != -torch.inf)
            if data["mask"]["is_visible"]:
                assert steps == pytest.approx(float(expected_score), rel=1e-5, abs=1e-5)
                assert data["site_score"] == pytest.approx(float(expected_score), rel=1e-6, abs=1e-6)
                assert data["score_matches"]
            else:
                assert data["site_score"] is None
                assert data["score_matches"] is None
                assert data["weight"] == 0
                assert data["mask"]["masked_by"] != ["other"]
            torch.testing.assert_close(tensors["weights"], row)
            masked = tensors["visible"] == 0
            logits = tensors["scores"].masked_fill(masked, -torch.inf)
            if data["sink_logit"] is not None:
                logits = torch.cat((logits, torch.tensor([data["sink_logit"]])))
            torch.testing.assert_close(logits.softmax(-1)[:num_keys], row)
            assert data["sink_weight"] == (None if data["sink_logit"] is None else pytest.approx(1 - float(row.sum())))
            torch.testing.assert_close(tensors["z"], plain(z)[0, position, head])
            assert data["z_matches"]
            assert data["z_difference"] < 1e-5


def test_key_defaults_to_the_largest_weight() -> None:
    inspector = open_inspector("tiny-llama")
    params = {"input": {"tokens": random_token_ids(9, 256)}, "attention": "blocks.1.attn", "head": 2, "position": 6}
    data, tensors = run_query(inspector, "worked_attention", **params)
    assert data["key"] == int(tensors["weights"].argmax())
    assert data["kv_head"] == 1
    assert data["heads_per_kv_head"] == 2


@pytest.mark.parametrize("name", ["RoPE and GQA", "interleaved partial RoPE", "YaRN"])
def test_q_before_rotation_is_the_projection(name: str) -> None:
    preset, attention = MODELS[name]
    inspector = build_inspector(preset, **attention)
    tokens = random_token_ids(NUM_TOKENS, 256)
    t = trace_attention(inspector, {"tokens": tokens})
    module = attention_module(get_blocks(inspector.model.stacks["decoder"])[1].attn)
    assert isinstance(module, MultiHead)
    with torch.no_grad():
        q, k, _ = module.project_qkv(plain(t["blocks.1.attn.in"]))
    params = {"input": {"tokens": tokens}, "attention": "blocks.1.attn", "head": 3, "position": 11, "key": 4}
    data, tensors = run_query(inspector, "worked_attention", **params)
    torch.testing.assert_close(tensors["q_before"], q[0, 11, 3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tensors["k_before"], k[0, 4, 1], rtol=1e-4, atol=1e-5)
    assert data["position_method"]["kind"] == "rope"
    assert not data["position_method"]["is_moved"]
    torch.testing.assert_close(tensors["q_angle"], 11 * tensors["frequency"])
    # The rotation by the angle maps each pair before to the pair after.
    factor = 1.0 if name != "YaRN" else float(tensors["q"].norm() / tensors["q_before"].norm())
    for pair in (0, 3):
        a, b = tensors["pairs"][pair].tolist()
        angle = tensors["q_angle"][pair]
        rotated = tensors["q_before"][a] * angle.cos() - tensors["q_before"][b] * angle.sin()
        torch.testing.assert_close(factor * rotated, tensors["q"][a], rtol=1e-4, atol=1e-4)


def test_position_methods() -> None:
    expected = {"learned positions": ("none", "learned"), "ALiBi": ("alibi", None), "RoPE and GQA": ("rope", None)}
    for name, (kind, embedding) in expected.items():
        preset, attention = MODELS[name]
        inspector = build_inspector(preset, **attention)
        params = {"input": {"tokens": [1, 2, 3, 4]}, "attention": "blocks.0.attn", "head": 1, "position": 3, "key": 1}
        method = run_query(inspector, "worked_attention", **params)[0]["position_method"]
        assert (method["kind"], method["embedding"]) == (kind, embedding)
    t5 = build_inspector("tiny-t5")
    model_input = {"tokens": [1, 2, 3], "source": [1, 2, 3, 4]}
    for attention_name, kind in (("encoder.blocks.1.attn", "relative_bias"), ("decoder.blocks.1.cross", "none")):
        params = {"input": model_input, "attention": attention_name, "head": 0, "position": 2}
        assert run_query(t5, "worked_attention", **params)[0]["position_method"]["kind"] == kind


def test_mask_reasons() -> None:
    inspector = build_inspector("tiny-gemma")
    layers = {layer["window"]: layer["name"] for layer in run_query(inspector, "attention_layers")[0]["layers"]}
    tokens = random_token_ids(NUM_TOKENS, 256)
    for window, position, key, masked_by in ((8, 12, 1, ["window"]), (None, 12, 1, []), (None, 3, 4, ["causal"])):
        params = {"attention": layers[window], "head": 0, "position": position, "key": key}
        mask = run_query(inspector, "worked_attention", input={"tokens": tokens}, **params)[0]["mask"]
        assert mask["masked_by"] == masked_by
        assert mask["is_visible"] == (not masked_by)
        assert mask["num_visible"] == min(position + 1, window or NUM_TOKENS)
    dropped = {"tokens": tokens, "edits": {"mask": "drop"}}
    params = {"attention": layers[None], "head": 0, "position": 3, "key": 4}
    mask = run_query(inspector, "worked_attention", input=dropped, **params)[0]["mask"]
    assert mask["is_visible"]
    assert not mask["is_causal"]


def test_weight_shares_equal_the_pattern() -> None:
    inspector = build_inspector("tiny-llama")
    tokens = [5, 6, 7, 5, 6, 9]
    params = {"input": {"tokens": tokens}, "attention": "blocks.0.attn", "head": 1}
    pattern = run_query(inspector, "attention_head", **params)[1]["pattern"]
    shares = {
        share["type"]: (share["share"], share["num_queries"])
        for share in run_query(inspector, "worked_attention", **params, position=5)[0]["weight_shares"]
    }
    previous = pattern.diagonal(-1)
    assert shares["previous_token"] == (pytest.approx(float(previous.mean())), 5)
    assert shares["first_token"] == (pytest.approx(float(pattern[1:, 0].mean())), 5)
    assert shares["query_token"] == (pytest.approx(float(pattern.diagonal()[1:].mean())), 5)
    assert shares["earlier_occurrence"] == (pytest.approx(float((pattern[3, 0] + pattern[4, 1]) / 2)), 2)
    assert shares["after_earlier_occurrence"] == (pytest.approx(float((pattern[3, 1] + pattern[4, 2]) / 2)), 2)
    assert "next_token" not in shares


def test_weight_share_on_the_first_token_counts_queries_beyond_the_window() -> None:
    inspector = build_inspector("tiny-gemma")
    layers = run_query(inspector, "attention_layers")[0]["layers"]
    windowed = next(layer["name"] for layer in layers if layer["window"] == 8)
    params = {"input": {"tokens": random_token_ids(NUM_TOKENS, 256)}, "attention": windowed, "head": 1}
    shares = run_query(inspector, "worked_attention", **params, position=5)[0]["weight_shares"]
    first = next(share for share in shares if share["type"] == "first_token")
    data, _ = run_query(inspector, "attention_head", **params)
    assert first == {
        "type": "first_token",
        "share": pytest.approx(data["first_token_weight"]),
        "num_queries": NUM_TOKENS - 1,
    }


def test_edited_pattern_and_moved_positions_are_reported() -> None:
    inspector = build_inspector("tiny-llama")
    params = {"attention": "blocks.0.attn", "head": 1, "position": 5, "key": 3}
    tokens = random_token_ids(9, 256)
    edited = {"tokens": tokens, "edits": {"blocks.0.attn.scores": {"do": "scale", "value": 0.5}}}
    assert run_query(inspector, "worked_attention", input=edited, **params)[0]["has_edited_pattern"]
    moved = {"tokens": tokens, "edits": {"positions": {"do": "shift", "value": 3}}}
    assert run_query(inspector, "worked_attention", input=moved, **params)[0]["position_method"]["is_moved"]
    dropped = {"tokens": tokens, "edits": {"positions": "drop"}}
    assert run_query(inspector, "worked_attention", input=dropped, **params)[0]["position_method"]["kind"] == "none"


def test_invalid_positions_are_errors() -> None:
    inspector = open_inspector("tiny-gpt")
    params = {"input": {"tokens": [1, 2, 3]}, "attention": "blocks.0.attn", "head": 0}
    with pytest.raises(InputError, match="query positions are 0 to 2"):
        run_query(inspector, "worked_attention", **params, position=3)
    with pytest.raises(InputError, match="key positions are 0 to 2"):
        run_query(inspector, "worked_attention", **params, position=0, key=3)
