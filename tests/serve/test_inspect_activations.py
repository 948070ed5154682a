"""What the page is told is what the library says: every stage of every kind of model, by its own Python snippet too."""

import contextlib
import io
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load
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


def inspector(name: str, **how: Any) -> Inspector:
    model = ct.build(name, seed=0)
    two = len(model.stacks) > 1
    return Inspector(model, TokenizerAdapter(model.config.vocab_size, None, 0 if two else None), name=name, **how)


def look_at(of: Inspector, length: int = 9, **edits: Any) -> dict[str, Any]:
    look: dict[str, Any] = {"tokens": torch.randint(of.config.vocab_size, (length,)).tolist(), "edits": edits}
    if len(of.model.stacks) > 1:
        look["source"] = torch.randint(of.config.vocab_size, (7,)).tolist()
    return look


def ask(of: Inspector, question: str, **given: Any) -> QueryResult:
    return QUERIES[question].model_validate_json(json.dumps(given)).run(of, QueryJob())


def row(ids: Any) -> Tensor | None:
    return None if ids is None else torch.tensor([ids])


def stages(of: Inspector) -> list[str]:
    attentions = [name.removesuffix(".q") for name in of.sites if name.endswith(".q")]
    extra = [f"{name}.{what}" for name in attentions for what in ("mask", "position")]
    return [
        *of.sites,
        *extra,
        *(f"{name}.{what}" for name in of.sites if name.endswith("embed") for what in ("token", "position")),
        "softmax",
    ]


def has_position(of: Inspector, site: str) -> bool:
    """Whether something there says where tokens stand."""
    stack: Any = of.sites[f"{site.removesuffix('.position')}{'' if 'embed' in site else '.q'}"].stack
    return ".cross." not in site and bool(stack.embed.position if "embed" in site else len(stack.positions))


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_is_what_its_own_snippet_prints(name: str) -> None:
    of = inspector(name)
    look, told, without = look_at(of), 0, 0
    for site in stages(of):
        if site.endswith(".position") and not has_position(of, site):
            with pytest.raises(InputError, match=r"position|stands"):
                ask(of, "activation", input=look, site=site, position=4, source_position=2)
            without += 1
            continue
        answer = ask(of, "activation", input=look, site=site, position=4, source_position=2)
        assert load(answer.to_safetensors()).keys() == answer.tensors.keys()
        assert answer.data["formulas"] or site.endswith("position"), site
        if not answer.data["python_code"]:
            continue
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(answer.data["python_code"], names)
        theirs, ours = names["values"].as_subclass(Tensor).float(), answer.tensors["values"]
        if "masked" in answer.tensors:
            ours = ours.masked_fill(answer.tensors["masked"], -torch.inf)
        if site.endswith(".mask"):
            ours = (ours == -torch.inf).float()
        if site in ("logits", "softmax"):
            theirs = theirs[answer.data["tokens"]]
        assert theirs.shape == ours.shape, site
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda text, site=site: f"{site}: {text}")
        told += 1
    assert told > len(of.sites)
    assert without < len(of.sites) / 4


@pytest.mark.parametrize("name", MODELS)
def test_a_lane_is_the_library_s_journey(name: str) -> None:
    of = inspector(name)
    look = look_at(of)
    told = ask(of, "journey", input=look, position=5, source_position=3).data
    journey = follow_token(of.model, row(look["tokens"]), row(look.get("source")), position=5, source_position=3)
    known = {stage.site: stage for stage in journey.stages}
    assert [each["site"] for each in told["stages"]][:1] == [next(iter(of.sites))]
    for each in told["stages"]:
        stage = known[each["site"]]
        assert each["norm"] == pytest.approx(stage.norm, rel=1e-6)
        assert each["relative_norm"] == (
            None if stage.relative_norm is None else pytest.approx(stage.relative_norm, rel=1e-6)
        )
        assert each["cosine"] == (None if stage.cosine is None else pytest.approx(stage.cosine, abs=1e-6))
        assert [(top["token"], pytest.approx(top["probability"], rel=1e-5)) for top in each["top_tokens"]] == list(
            stage.top_tokens
        )
    assert told["residual_sum_error"] == journey.residual_sum_error


@pytest.mark.parametrize("name", MODELS)
def test_proofs_hold(name: str) -> None:
    of = inspector(name)
    told = ask(of, "consistency_check", input=look_at(of)).data
    assert told["pattern_row_error"] < 1e-6
    assert told["residual_sum_error"] is None or told["residual_sum_error"] < 1e-6
    assert told["cache_error"] is None or told["cache_error"] < 1e-5 * max(1.0, told["max_abs_logit"])


def test_the_next_token_s_chances_are_what_generation_draws_from() -> None:
    of = inspector("tiny-llama")
    look = look_at(of)
    told = ask(of, "next_token", input=look, position=8, temperature=0.7, top_k=10).data
    logits = of.model(row(look["tokens"]))[0, 8].detach()
    share, warm = logits.softmax(-1), (logits / 0.7).softmax(-1)
    best = share.topk(5)
    assert [each["token"] for each in told["top_tokens"]] == best.indices.tolist()
    assert [each["probability"] for each in told["top_tokens"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    left = warm.topk(10).values.sum()
    assert [each["sampling_probability"] for each in told["top_tokens"]] == pytest.approx(
        (warm[best.indices] / left).tolist(), rel=1e-4
    )
    assert told["num_candidates"] == 10
    assert told["probability_sum"] == pytest.approx(1.0, abs=1e-5)


def test_edits_are_part_of_what_is_looked_at() -> None:
    of = inspector("tiny-gpt")
    plain = look_at(of)
    skipped = plain | {"edits": {"blocks.1": "skip"}}
    one, other = (ask(of, "journey", input=look, position=8).data["stages"][-1] for look in (plain, skipped))
    assert one["site"] == other["site"] == "final_norm"
    assert one["norm"] != other["norm"]
    assert len(of.activation_caches) == 2
    with ct.edit(of.model, skipped["edits"]):
        journey = follow_token(of.model, row(plain["tokens"]), position=8)
    assert other["norm"] == pytest.approx(journey.stages[-2].norm)
    again = ask(of, "journey", input=plain, position=8).data["stages"][-1]
    assert again == one


def test_what_is_kept_is_bounded_and_what_is_not_kept_is_read_again() -> None:
    whole, tight = inspector("tiny-llama"), inspector("tiny-llama", max_cached_bytes=60_000)
    look = look_at(whole)
    for site in ("blocks.1.attn.q", "blocks.2.ffn.hidden", "blocks.3.attn.pattern"):
        one, other = (
            ask(of, "activation", input=look, site=site, position=3).tensors["values"] for of in (whole, tight)
        )
        assert torch.equal(one, other)
    for _ in range(5):
        ask(tight, "residual_norms", input=look_at(tight))
    assert len(tight.activation_caches) < 3


def test_work_that_nobody_waits_for_ends() -> None:
    of, job = inspector("tiny-gpt"), QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        QUERIES["residual_norms"](input=look_at(of)).run(of, job)
    assert not of.activation_caches
    assert ask(of, "residual_norms", input=look_at(of)).tensors["decoder"].shape == (5, 9)


@pytest.mark.parametrize(
    ("question", "given", "said"),
    [
        ("activation", {"site": "blocks.0.attn.nothing", "position": 0}, "no stage of this model"),
        ("activation", {"site": "blocks.0.attn.q", "position": 9}, "place 9 is none"),
        ("next_token", {"position": 9}, "9 is none"),
        ("journey", {"position": 9}, "position"),
    ],
)
def test_what_cannot_be_asked_is_told(question: str, given: dict[str, Any], said: str) -> None:
    of = inspector("tiny-gpt")
    with pytest.raises(InputError, match=said):
        ask(of, question, input=look_at(of), **given)
    with pytest.raises(InputError, match="vocabulary ends at 256"):
        ask(of, "residual_norms", input={"tokens": [1, 257]})
    with pytest.raises(InputError, match="reads no source"):
        ask(of, "residual_norms", input={"tokens": [1], "source": [1]})
