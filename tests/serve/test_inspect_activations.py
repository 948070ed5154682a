"""Activation, journey, next-token and consistency queries equal the library, and each site's Python snippet."""

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load
from support.inspector import open_inspector
from support.nightly import nightly_except
from torch import Tensor

import cutaway as ct
from cutaway.errors import InputError
from cutaway.lens import follow_token
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import QueryCancelled, QueryJob, QueryResult
from cutaway.serve.inspect.queries import QUERIES

pytestmark = pytest.mark.unchecked

MODELS = ["tiny-gpt", "tiny-llama", "tiny-t5", "tiny-bert", "tiny-gemma", "tiny-mla", "tiny-moe"]


def build_inspector(name: str, **options: Any) -> Inspector:
    model = ct.build(name, seed=0)
    is_encoder_decoder = len(model.stacks) > 1
    return Inspector(
        model, TokenizerAdapter(model.config.vocab_size, None, 0 if is_encoder_decoder else None), name=name, **options
    )


def random_input(inspector: Inspector, length: int = 9, **edits: Any) -> dict[str, Any]:
    model_input: dict[str, Any] = {
        "tokens": torch.randint(inspector.config.vocab_size, (length,)).tolist(),
        "edits": edits,
    }
    if len(inspector.model.stacks) > 1:
        model_input["source"] = torch.randint(inspector.config.vocab_size, (7,)).tolist()
    return model_input


def run_query(inspector: Inspector, query_name: str, **params: Any) -> QueryResult:
    return QUERIES[query_name].model_validate_json(json.dumps(params)).run(inspector, QueryJob())


def batch(ids: Any) -> Tensor | None:
    return None if ids is None else torch.tensor([ids])


def activation_sites(inspector: Inspector) -> list[str]:
    attentions = [name.removesuffix(".q") for name in inspector.sites if name.endswith(".q")]
    extra = [f"{name}.{suffix}" for name in attentions for suffix in ("mask", "position")]
    return [
        *inspector.sites,
        *extra,
        *(f"{name}.{suffix}" for name in inspector.sites if name.endswith("embed") for suffix in ("token", "position")),
        "softmax",
    ]


def has_position(inspector: Inspector, site: str) -> bool:
    """Return whether the site has position information."""
    stack: Any = inspector.sites[f"{site.removesuffix('.position')}{'' if 'embed' in site else '.q'}"].stack
    return ".cross." not in site and bool(stack.embed.position if "embed" in site else len(stack.positions))


@pytest.mark.parametrize("name", nightly_except(("tiny-llama",), MODELS))
def test_activation_equals_its_python_snippet(name: str) -> None:
    inspector = build_inspector(name)
    model_input, num_checked, num_without_position = random_input(inspector), 0, 0
    for site in activation_sites(inspector):
        if site.endswith(".position") and not has_position(inspector, site):
            with pytest.raises(InputError, match="position"):
                run_query(inspector, "activation", input=model_input, site=site, position=4, source_position=2)
            num_without_position += 1
            continue
        result = run_query(inspector, "activation", input=model_input, site=site, position=4, source_position=2)
        assert load(result.to_safetensors()).keys() == result.tensors.keys()
        assert result.data["formulas"] or site.endswith("position"), site
        if not result.data["python_code"]:
            continue
        namespace: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(result.data["python_code"], namespace)
        printed, values = namespace["values"].as_subclass(Tensor).float(), result.tensors["values"]
        if "masked" in result.tensors:
            values = values.masked_fill(result.tensors["masked"], -torch.inf)
        if site.endswith(".mask"):
            values = (values == -torch.inf).float()
        if site in ("logits", "softmax"):
            printed = printed[result.data["tokens"]]
        assert printed.shape == values.shape, site
        torch.testing.assert_close(values, printed, atol=1e-5, rtol=1e-5, msg=lambda text, site=site: f"{site}: {text}")
        num_checked += 1
    assert num_checked > len(inspector.sites)
    assert num_without_position < len(inspector.sites) / 4


@pytest.mark.parametrize("name", MODELS)
def test_journey_equals_follow_token(name: str) -> None:
    inspector = build_inspector(name)
    model_input = random_input(inspector)
    data = run_query(inspector, "journey", input=model_input, position=5, source_position=3).data
    journey = follow_token(
        inspector.model, batch(model_input["tokens"]), batch(model_input.get("source")), position=5, source_position=3
    )
    stage_by_site = {stage.site: stage for stage in journey.stages}
    assert [row["site"] for row in data["stages"]][:1] == [next(iter(inspector.sites))]
    for row in data["stages"]:
        stage = stage_by_site[row["site"]]
        assert row["norm"] == pytest.approx(stage.norm, rel=1e-6)
        assert row["relative_norm"] == (
            None if stage.relative_norm is None else pytest.approx(stage.relative_norm, rel=1e-6)
        )
        assert row["cosine"] == (None if stage.cosine is None else pytest.approx(stage.cosine, abs=1e-6))
        assert [(top["token"], pytest.approx(top["probability"], rel=1e-5)) for top in row["top_tokens"]] == list(
            stage.top_tokens
        )
    assert data["residual_sum_error"] == journey.residual_sum_error


def test_text_of_a_continuation_adds_exactly_the_predicted_token() -> None:
    """The texts are only at the last position, and a token that no text adds, such as a special token, has none."""
    inspector = open_inspector("tiny-english")
    tokens = inspector.tokenizer.encode("The cat sat on the")
    data = run_query(inspector, "next_token", input={"tokens": tokens}, position=len(tokens) - 1).data
    for row in data["top_tokens"]:
        assert inspector.tokenizer.encode(f"The cat sat on the{row['continuation']}") == [*tokens, row["token"]]
    earlier = run_query(inspector, "next_token", input={"tokens": tokens}, position=1).data
    assert not any("continuation" in row for row in earlier["top_tokens"])
    end_of_text = inspector.tokenizer.tokenizer.eos_token_id
    assert inspector.tokenizer.continuation_text(tokens, end_of_text) is None


@pytest.mark.parametrize("name", MODELS)
def test_consistency_check_errors_are_small(name: str) -> None:
    inspector = build_inspector(name)
    data = run_query(inspector, "consistency_check", input=random_input(inspector)).data
    assert data["pattern_row_error"] < 1e-6
    assert data["residual_sum_error"] is None or data["residual_sum_error"] < 1e-6
    assert data["cache_error"] is None or data["cache_error"] < 1e-5 * max(1.0, data["max_abs_logit"])


def test_next_token_equals_sampling_distribution() -> None:
    inspector = build_inspector("tiny-llama")
    model_input = random_input(inspector)
    data = run_query(inspector, "next_token", input=model_input, position=8, temperature=0.7, top_k=10).data
    logits = inspector.model(batch(model_input["tokens"]))[0, 8].detach()
    probabilities, tempered = logits.softmax(-1), (logits / 0.7).softmax(-1)
    top = probabilities.topk(5)
    assert [row["token"] for row in data["top_tokens"]] == top.indices.tolist()
    assert [row["probability"] for row in data["top_tokens"]] == pytest.approx(top.values.tolist(), rel=1e-5)
    mass = tempered.topk(10).values.sum()
    assert [row["sampling_probability"] for row in data["top_tokens"]] == pytest.approx(
        (tempered[top.indices] / mass).tolist(), rel=1e-4
    )
    assert data["num_candidates"] == 10
    assert data["probability_sum"] == pytest.approx(1.0, abs=1e-5)


def test_edits_are_part_of_the_cache_key() -> None:
    inspector = build_inspector("tiny-gpt")
    unedited = random_input(inspector)
    skipped = unedited | {"edits": {"blocks.1": "skip"}}
    unedited_stage, edited_stage = (
        run_query(inspector, "journey", input=model_input, position=8).data["stages"][-1]
        for model_input in (unedited, skipped)
    )
    assert unedited_stage["site"] == edited_stage["site"] == "final_norm"
    assert unedited_stage["norm"] != edited_stage["norm"]
    assert len(inspector.activation_caches) == 2
    with ct.edit(inspector.model, skipped["edits"]):
        journey = follow_token(inspector.model, batch(unedited["tokens"]), position=8)
    assert edited_stage["norm"] == pytest.approx(journey.stages[-2].norm)
    repeated_stage = run_query(inspector, "journey", input=unedited, position=8).data["stages"][-1]
    assert repeated_stage == unedited_stage


def test_cache_is_bounded_and_missing_sites_are_recomputed() -> None:
    full, limited = build_inspector("tiny-llama"), build_inspector("tiny-llama", max_cached_bytes=60_000)
    model_input = random_input(full)
    for site in ("blocks.1.attn.q", "blocks.2.ffn.hidden", "blocks.3.attn.pattern"):
        full_values, limited_values = (
            run_query(inspector, "activation", input=model_input, site=site, position=3).tensors["values"]
            for inspector in (full, limited)
        )
        assert torch.equal(full_values, limited_values)
    for _ in range(5):
        run_query(limited, "residual_norms", input=random_input(limited))
    assert len(limited.activation_caches) < 3


def test_cancelled_query_raises_and_caches_nothing() -> None:
    inspector, job = build_inspector("tiny-gpt"), QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        QUERIES["residual_norms"](input=random_input(inspector)).run(inspector, job)
    assert not inspector.activation_caches
    assert run_query(inspector, "residual_norms", input=random_input(inspector)).tensors["decoder"].shape == (5, 9)


@pytest.mark.parametrize(
    ("query_name", "params", "message"),
    [
        ("activation", {"site": "blocks.0.attn.nothing", "position": 0}, "not a site of this model"),
        ("activation", {"site": "blocks.0.attn.q", "position": 9}, "position is 9"),
        ("next_token", {"position": 9}, "position is 9"),
        ("journey", {"position": 9}, "position"),
    ],
)
def test_invalid_query_is_an_error(query_name: str, params: dict[str, Any], message: str) -> None:
    inspector = build_inspector("tiny-gpt")
    with pytest.raises(InputError, match=message):
        run_query(inspector, query_name, input=random_input(inspector), **params)
    with pytest.raises(InputError, match="use ids 0 to 256, the vocabulary"):
        run_query(inspector, "residual_norms", input={"tokens": [1, 257]})
    with pytest.raises(InputError, match="takes no source"):
        run_query(inspector, "residual_norms", input={"tokens": [1], "source": [1]})
