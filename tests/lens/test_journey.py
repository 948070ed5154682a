"""follow_token equals a trace, needs one forward pass, and its consistency checks hold."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.config_strategies import SEEDS, build_randomized_model, configs, has_additive_residual, random_tokens

import cutaway as ct
from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.lens import Journey, Trace, attention_pattern, follow_token, sites
from cutaway.lens.journey import run_model
from cutaway.model import Transformer

PRESETS = [name for name in ct.presets() if name.startswith("tiny-")]
VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {"placement": {"kind": "parallel"}},
    "parallel, two norms": {"placement": {"kind": "parallel", "norms": "two"}},
    "deep norm": {"placement": {"kind": "post", "skip_scale": 1.7}},
    "norm skip": {"placement": {"kind": "pre", "norm_skip": True}},
    "scaled": {"residual_scale": 0.3},
    "shared": {"layer_groups": 1, "layers": 3},
}


def build_variant(**decoder: Any) -> Transformer:
    data = ct.config("tiny-gpt").model_dump()
    return ct.build(ct.config(data | {"decoder": data["decoder"] | decoder}), seed=0)


def build_with_sink() -> Transformer:
    data = ct.config("tiny-gpt").model_dump()
    data["decoder"]["block"][0]["attention"]["sink"] = True
    return ct.build(ct.config(data), seed=0)


def build_with_tokens(name: str) -> tuple[Transformer, torch.Tensor, torch.Tensor | None]:
    model = ct.build(name, seed=0) if name in PRESETS else build_variant(**VARIANTS[name])
    size = model.config.vocab_size
    source = torch.randint(0, size, (1, 5)) if len(model.stacks) > 1 else None
    return model, torch.randint(0, size, (1, 7)), source


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_journey_equals_trace(name: str) -> None:
    """Site, shape, norm, relative norm, cosine and logit lens predictions of every stage."""
    model, tokens, source = build_with_tokens(name)
    position, source_position = 3, 1
    journey = follow_token(model, tokens, source, position=position, source_position=source_position)
    with torch.no_grad(), Trace(model, "*", dtype=torch.float64) as t:
        result = run_model(model, tokens, tokens if source is None else source)
    assert [stage.site for stage in journey.stages] == list(sites(model))
    positions = {"encoder": source_position if source is not None else position, "decoder": position}
    assert journey.positions == {stack: positions[stack] for stack in model.stacks}
    has_two_stacks = len(model.stacks) > 1

    def traced_vector(site: str) -> torch.Tensor:
        is_source = site.startswith("encoder.") or site.endswith(("cross.k", "cross.v"))
        index = source_position if is_source else position
        value = t[site].as_subclass(torch.Tensor)
        if site.endswith(".router"):
            return value[index]
        return value[0, :, index] if site.endswith((".scores", ".pattern")) else value[0, index]

    for stage in journey.stages:
        shape = tuple(t[stage.site].shape)
        assert stage.shape == (shape if stage.site.endswith(".router") else shape[1:])
        assert len(stage.axes.split()) == len(stage.shape)
        expected = traced_vector(stage.site).nan_to_num(neginf=0.0)
        assert stage.norm == pytest.approx(float(expected.norm()), abs=1e-6)
        assert (stage.relative_norm is None) == (not stage.site.endswith(".out"))
    skip_scale = getattr(next(iter(model.stacks.values())).blocks[0], "skip_scale", 1.0)
    before = {"attn": "resid_pre", "cross": "cross.resid_pre", "ffn": "resid_pre" if "par" in name else "resid_mid"}
    for stage in journey.stages:
        if stage.site.endswith(".out"):
            block, sublayer, _ = stage.site.rsplit(".", 2)
            skipped = f"{sublayer}.in" if name == "norm skip" else before[sublayer]
            resid = traced_vector(f"{block}.{skipped}") * skip_scale
            out = traced_vector(stage.site)
            assert stage.relative_norm == pytest.approx(float(out.norm() / resid.norm()), rel=1e-5)
            assert stage.cosine == pytest.approx(float(torch.cosine_similarity(resid, out, 0)), abs=1e-5)
    head: Any = getattr(model, "head", None)
    if head is None:
        assert not journey.top_tokens
        assert not any(stage.top_tokens for stage in journey.stages)
        return
    top = result[0, position].softmax(-1).topk(5)
    assert [token for token, _ in journey.top_tokens] == top.indices.tolist()
    assert [probability for _, probability in journey.top_tokens] == pytest.approx(top.values.tolist())
    prefix = "decoder." if has_two_stacks else ""
    last = next(stage for stage in journey.stages if stage.site == f"{prefix}final_norm")
    assert [token for token, _ in last.top_tokens] == top.indices.tolist()
    stack = model.stacks.get("decoder") or model.stacks["encoder"]
    early = next(stage for stage in journey.stages if stage.site == f"{prefix}blocks.0.resid_post")
    with torch.no_grad():
        probs = head(stack.final_norm(traced_vector(early.site).float()[None]))[0].softmax(-1)
    assert early.top_tokens[0] == (int(probs.argmax()), pytest.approx(float(probs.max()), rel=1e-4))
    assert not any(stage.top_tokens for stage in journey.stages if has_two_stacks and stage.site.startswith("encoder."))


@pytest.mark.parametrize("name", [*PRESETS, *VARIANTS])
def test_residual_sum_and_pattern_rows(name: str) -> None:
    """embed + Σ sublayer outputs equals the residual stream bit for bit, except with post-norm or skip scales."""
    model, tokens, source = build_with_tokens(name)
    journey = follow_token(model, tokens, source)
    is_additive = all(has_additive_residual(stack) for stack in model.config.stacks.values())
    assert journey.residual_sum_error == (0.0 if is_additive else None)
    assert journey.pattern_row_error is not None
    assert journey.pattern_row_error < 1e-6


def test_pattern_row_error_is_none_with_a_sink() -> None:
    model = build_with_sink()
    journey = follow_token(model, torch.randint(0, 257, (1, 6)))
    assert journey.pattern_row_error is None
    assert journey.residual_sum_error == 0.0


def test_one_forward_pass_and_patterns_only_at_selected_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, _ = build_with_tokens("shared")
    calls: list[str] = []
    original = attention_pattern.compute_scores
    monkeypatch.setattr(attention_pattern, "compute_scores", lambda *args: calls.append("pattern") or original(*args))
    handle = model.stacks["decoder"].register_forward_pre_hook(lambda *_: calls.append("pass"))
    journey = follow_token(model, tokens, site_names=["embed", "blocks.2.attn.pattern", "blocks.2.attn.out"])
    handle.remove()
    assert calls == ["pass", "pattern"]
    assert [stage.site for stage in journey.stages] == ["embed", "blocks.2.attn.pattern", "blocks.2.attn.out"]
    assert journey.residual_sum_error == 0.0
    assert len(journey.top_tokens) == 5


def test_hooks_are_removed() -> None:
    model, tokens, _ = build_with_tokens("tiny-moe")
    before = model(tokens)
    follow_token(model, tokens)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(before, model(tokens))


def test_trace_around_follow_token_records_one_call() -> None:
    model, tokens, _ = build_with_tokens("tiny-gpt")
    with Trace(model, "*") as t:
        follow_token(model, tokens)
    assert {len(t.calls(name)) for name in t} == {1}


def test_journey_html() -> None:
    model, tokens, _ = build_with_tokens("tiny-gpt")
    html = follow_token(model, tokens)._repr_html_()
    assert html.count("<tr>") == 1 + len(sites(model))
    assert "H 4 × T 7 × S 7" in html


def test_layers_that_share_a_block_are_distinguished() -> None:
    """ALBERT's layers apply the same weights to different residual streams."""
    model, tokens, _ = build_with_tokens("tiny-albert")
    by_site = {stage.site: stage.norm for stage in follow_token(model, tokens).stages}
    outs = [by_site[f"blocks.{layer}.ffn.out"] for layer in range(4)]
    assert len(set(outs)) == 4


def test_bfloat16_residual_sum_is_exact() -> None:
    model, tokens, _ = build_with_tokens("tiny-llama")
    assert follow_token(model.to(torch.bfloat16), tokens).residual_sum_error == 0.0


def test_invalid_arguments_are_errors() -> None:
    model, tokens, _ = build_with_tokens("tiny-gpt")
    with pytest.raises(InputError, match="0 to 6"):
        follow_token(model, tokens, position=7)
    with pytest.raises(InputError, match=r"\(1, length\)"):
        follow_token(model, tokens.expand(2, -1))
    with pytest.raises(InputError, match="no site 'resid_pst'; use one of resid_post"):
        follow_token(model, tokens, site_names=["resid_pst"])
    stages = follow_token(model, tokens, site_names=["resid_post", "embed"]).stages
    assert [stage.site for stage in stages] == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    with pytest.raises(InputError, match="meta"):
        follow_token(ct.build("tiny-gpt", device="meta"), tokens)


def equations(model: Transformer) -> dict[str, str]:
    size = model.config.vocab_size
    tokens = torch.randint(0, size, (1, 4))
    journey: Journey = follow_token(model, tokens, tokens if len(model.stacks) > 1 else None)
    return {stage.site: stage.equation for stage in journey.stages}


def test_equations_match_the_config() -> None:
    gemma, bert = equations(ct.build("tiny-gemma", seed=0)), equations(ct.build("tiny-bert", seed=0))
    assert gemma["blocks.0.attn.q"] == "rope(Wq·in)"
    assert gemma["blocks.0.attn.out"] == "norm(Wo·z)"
    assert gemma["blocks.0.attn.scores"] == "cap(q·kᵀ·scale) + mask"
    assert gemma["logits"] == "cap(E·x)"
    assert bert["embed"] == "norm(E[token] + position + type)"
    assert bert["blocks.0.attn.scores"] == "q·kᵀ·scale"
    assert bert["blocks.0.resid_mid"] == "norm(x + attn.out)"
    t5 = equations(ct.build("tiny-t5", seed=0))
    assert t5["decoder.blocks.0.cross.k"] == "Wk·memory"
    assert t5["decoder.blocks.1.attn.scores"] == "q·kᵀ·scale + bias + mask"
    assert t5["decoder.blocks.1.resid_mid"] == "x + cross.out"
    deep = equations(build_variant(**VARIANTS["deep norm"]))
    assert deep["blocks.0.resid_post"] == "norm(1.7·x + ffn.out)"
    assert equations(build_variant(**VARIANTS["parallel"]))["blocks.0.resid_post"] == "x + attn.out + ffn.out"
    assert equations(build_variant(**VARIANTS["scaled"]))["blocks.0.ffn.out"] == "0.3·W2·hidden"
    assert equations(build_with_sink())["blocks.0.attn.pattern"] == "softmax(scores, sink)"


def test_saved_trace_contains_every_site(tmp_path: Any) -> None:
    """A block's resid_post and the next block's resid_pre are one tensor, but two entries in the file."""
    from safetensors.torch import load_file

    model, tokens, _ = build_with_tokens("tiny-gpt")
    with torch.no_grad(), Trace(model, "*") as t:
        model(tokens)
    t.save(tmp_path / "all.safetensors")
    loaded = load_file(tmp_path / "all.safetensors")
    assert loaded.keys() == set(sites(model))
    for name, value in loaded.items():
        assert torch.equal(value, t[name])


@pytest.mark.nightly
@settings(max_examples=15)
@given(config=configs(), seed=SEEDS)
def test_follow_token_for_random_configs(config: Config, seed: int) -> None:
    """Every site is recorded, and the residual sum is exact for every placement but post-norm."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 1, 6, seed)
    source = random_tokens(config, 1, 4, seed, "source") if len(model.stacks) > 1 else None
    journey = follow_token(model, tokens, source, position=2, source_position=1)
    assert [stage.site for stage in journey.stages] == list(sites(model))
    assert all(stage.equation for stage in journey.stages)
    is_additive = all(has_additive_residual(stack) for stack in config.stacks.values())
    assert (
        journey.residual_sum_error == 0.0
        if is_additive
        else journey.residual_sum_error is None or journey.residual_sum_error == 0.0
    )
    assert journey.pattern_row_error is None or journey.pattern_row_error < 1e-5
