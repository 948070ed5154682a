"""A token's journey: the same numbers that a trace gives, from one pass, with the sums that prove it whole."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.config_strategies import SEEDS, build_randomized_model, configs, random_tokens

import cutaway as ct
from cutaway.config import Config
from cutaway.errors import InputError
from cutaway.lens import Journey, Trace, attention_pattern, follow_token, sites
from cutaway.lens.journey import run_model
from cutaway.model import Transformer

PRESETS = [name for name in ct.presets() if name.startswith("tiny-")]
CHANGED: dict[str, dict[str, Any]] = {
    "parallel": {"placement": {"kind": "parallel"}},
    "parallel, two norms": {"placement": {"kind": "parallel", "norms": "two"}},
    "deep norm": {"placement": {"kind": "post", "skip_scale": 1.7}},
    "scaled": {"residual_scale": 0.3},
    "shared": {"layer_groups": 1, "layers": 3},
}


def changed(**changes: Any) -> Transformer:
    data = ct.config("tiny-gpt").model_dump()
    return ct.build(ct.config(data | {"decoder": data["decoder"] | changes}), seed=0)


def with_sink() -> Transformer:
    data = ct.config("tiny-gpt").model_dump()
    data["decoder"]["block"][0]["attention"]["sink"] = True
    return ct.build(ct.config(data), seed=0)


def made(name: str) -> tuple[Transformer, torch.Tensor, torch.Tensor | None]:
    model = ct.build(name, seed=0) if name in PRESETS else changed(**CHANGED[name])
    size = model.config.vocab_size
    source = torch.randint(0, size, (1, 5)) if len(model.stacks) > 1 else None
    return model, torch.randint(0, size, (1, 7)), source


@pytest.mark.parametrize("name", [*PRESETS, *CHANGED])
def test_a_journey_tells_what_a_trace_holds(name: str) -> None:
    """Every site, its shape and the token's vector; what is added and where the stream points; what it would say."""
    model, tokens, source = made(name)
    at, source_at = 3, 1
    journey = follow_token(model, tokens, source, position=at, source_position=source_at)
    with torch.no_grad(), Trace(model, "*", dtype=torch.float64) as t:
        result = run_model(model, tokens, tokens if source is None else source)
    assert [stage.site for stage in journey.stages] == list(sites(model))
    places = {"encoder": source_at if source is not None else at, "decoder": at}
    assert journey.positions == {stack: places[stack] for stack in model.stacks}
    both = len(model.stacks) > 1

    def of(site: str) -> torch.Tensor:
        place = source_at if site.startswith("encoder.") or site.endswith(("cross.k", "cross.v")) else at
        value = t[site].as_subclass(torch.Tensor)
        if site.endswith(".router"):
            return value[place]
        return value[0, :, place] if site.endswith((".scores", ".pattern")) else value[0, place]

    for stage in journey.stages:
        shape = tuple(t[stage.site].shape)
        assert stage.shape == (shape if stage.site.endswith(".router") else shape[1:])
        assert len(stage.axes.split()) == len(stage.shape)
        expected = of(stage.site).nan_to_num(neginf=0.0)
        assert stage.norm == pytest.approx(float(expected.norm()), abs=1e-6)
        assert (stage.relative_norm is None) == (not stage.site.endswith(".out"))
    skip_scale = getattr(next(iter(model.stacks.values())).blocks[0], "skip_scale", 1.0)
    before = {"attn": "resid_pre", "cross": "cross.resid_pre", "ffn": "resid_pre" if "par" in name else "resid_mid"}
    for stage in journey.stages:
        if stage.site.endswith(".out"):
            here, part, _ = stage.site.rsplit(".", 2)
            stream, out = of(f"{here}.{before[part]}") * skip_scale, of(stage.site)
            assert stage.relative_norm == pytest.approx(float(out.norm() / stream.norm()), rel=1e-5)
            assert stage.cosine == pytest.approx(float(torch.cosine_similarity(stream, out, 0)), abs=1e-5)
    head: Any = getattr(model, "head", None)
    if head is None:
        assert not journey.top_tokens
        assert not any(stage.top_tokens for stage in journey.stages)
        return
    best = result[0, at].softmax(-1).topk(5)
    assert [token for token, _ in journey.top_tokens] == best.indices.tolist()
    assert [share for _, share in journey.top_tokens] == pytest.approx(best.values.tolist())
    prefix = "decoder." if both else ""
    last = next(stage for stage in journey.stages if stage.site == f"{prefix}final_norm")
    assert [token for token, _ in last.top_tokens] == best.indices.tolist()
    writer = model.stacks.get("decoder") or model.stacks["encoder"]
    early = next(stage for stage in journey.stages if stage.site == f"{prefix}blocks.0.resid_post")
    with torch.no_grad():
        said = head(writer.final_norm(of(early.site).float()[None]))[0].softmax(-1)
    assert early.top_tokens[0] == (int(said.argmax()), pytest.approx(float(said.max()), rel=1e-4))
    assert not any(stage.top_tokens for stage in journey.stages if both and stage.site.startswith("encoder."))


@pytest.mark.parametrize("name", [*PRESETS, *CHANGED])
def test_the_proofs(name: str) -> None:
    """Embedding and additions are the stream bit for bit, except where norms or scales stand on it."""
    model, tokens, source = made(name)
    journey = follow_token(model, tokens, source)
    plain = all(stack.placement.kind != "post" for stack in model.config.stacks.values())
    assert journey.residual_sum_error == (0.0 if plain else None)
    assert journey.pattern_row_error is not None
    assert journey.pattern_row_error < 1e-6


def test_a_sink_takes_a_share_of_every_row() -> None:
    model = with_sink()
    journey = follow_token(model, torch.randint(0, 257, (1, 6)))
    assert journey.pattern_row_error is None
    assert journey.residual_sum_error == 0.0


def test_one_pass_and_patterns_only_where_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, _ = made("shared")
    calls: list[str] = []
    seen = attention_pattern.compute_scores
    monkeypatch.setattr(attention_pattern, "compute_scores", lambda *given: calls.append("pattern") or seen(*given))
    handle = model.stacks["decoder"].register_forward_pre_hook(lambda *_: calls.append("pass"))
    journey = follow_token(model, tokens, site_names=["embed", "blocks.2.attn.pattern", "blocks.2.attn.out"])
    handle.remove()
    assert calls == ["pass", "pattern"]
    assert [stage.site for stage in journey.stages] == ["embed", "blocks.2.attn.pattern", "blocks.2.attn.out"]
    assert journey.residual_sum_error == 0.0
    assert len(journey.top_tokens) == 5


def test_a_journey_leaves_nothing_behind() -> None:
    model, tokens, _ = made("tiny-moe")
    before = model(tokens)
    follow_token(model, tokens)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(before, model(tokens))


def test_who_traces_around_a_journey_sees_one_pass() -> None:
    model, tokens, _ = made("tiny-gpt")
    with Trace(model, "*") as t:
        follow_token(model, tokens)
    assert {len(t.calls(name)) for name in t} == {1}


def test_a_journey_draws_itself() -> None:
    model, tokens, _ = made("tiny-gpt")
    drawn = follow_token(model, tokens)._repr_html_()
    assert drawn.count("<tr>") == 1 + len(sites(model))
    assert "H 4 × T 7 × S 7" in drawn


def test_layers_that_share_a_block_are_told_apart() -> None:
    """Each of ALBERT's layers reads another stream through the same weights."""
    model, tokens, _ = made("tiny-albert")
    by_site = {stage.site: stage.norm for stage in follow_token(model, tokens).stages}
    outs = [by_site[f"blocks.{layer}.ffn.out"] for layer in range(4)]
    assert len(set(outs)) == 4


def test_half_precision_adds_up_bit_for_bit() -> None:
    model, tokens, _ = made("tiny-llama")
    assert follow_token(model.to(torch.bfloat16), tokens).residual_sum_error == 0.0


def test_what_cannot_be_followed() -> None:
    model, tokens, _ = made("tiny-gpt")
    with pytest.raises(InputError, match="0 to 6"):
        follow_token(model, tokens, position=7)
    with pytest.raises(InputError, match=r"\(1, length\)"):
        follow_token(model, tokens.expand(2, -1))
    with pytest.raises(InputError, match="no site 'resid_pst'; there is resid_post"):
        follow_token(model, tokens, site_names=["resid_pst"])
    told = follow_token(model, tokens, site_names=["resid_post", "embed"]).stages
    assert [stage.site for stage in told] == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    with pytest.raises(InputError, match="meta"):
        follow_token(ct.build("tiny-gpt", device="meta"), tokens)


def equations(model: Transformer) -> dict[str, str]:
    size = model.config.vocab_size
    tokens = torch.randint(0, size, (1, 4))
    journey: Journey = follow_token(model, tokens, tokens if len(model.stacks) > 1 else None)
    return {stage.site: stage.equation for stage in journey.stages}


def test_equations_are_the_models_own() -> None:
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
    deep = equations(changed(**CHANGED["deep norm"]))
    assert deep["blocks.0.resid_post"] == "norm(1.7·x + ffn.out)"
    assert equations(changed(**CHANGED["parallel"]))["blocks.0.resid_post"] == "x + attn.out + ffn.out"
    assert equations(changed(**CHANGED["scaled"]))["blocks.0.ffn.out"] == "0.3·W2·hidden"
    assert equations(with_sink())["blocks.0.attn.pattern"] == "softmax(scores, sink)"


def test_a_saved_trace_holds_every_site(tmp_path: Any) -> None:
    """One block's result is what the next is given: one tensor, but two names in a file."""
    from safetensors.torch import load_file

    model, tokens, _ = made("tiny-gpt")
    with torch.no_grad(), Trace(model, "*") as t:
        model(tokens)
    t.save(tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == set(sites(model))
    for name, value in found.items():
        assert torch.equal(value, t[name])


@settings(max_examples=15)
@given(config=configs(), seed=SEEDS)
def test_any_transformer_can_be_followed(config: Config, seed: int) -> None:
    """Every site that the model has is told of, and where blocks only add, the sum is the stream."""
    model = build_randomized_model(config, torch.float64, seed)
    tokens = random_tokens(config, 1, 6, seed)
    source = random_tokens(config, 1, 4, seed, "source") if len(model.stacks) > 1 else None
    journey = follow_token(model, tokens, source, position=2, source_position=1)
    assert [stage.site for stage in journey.stages] == list(sites(model))
    assert all(stage.equation for stage in journey.stages)
    plain = all(stack.placement.kind != "post" for stack in config.stacks.values())
    assert (
        journey.residual_sum_error == 0.0
        if plain
        else journey.residual_sum_error is None or journey.residual_sum_error == 0.0
    )
    assert journey.pattern_row_error is None or journey.pattern_row_error < 1e-5
