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
from cutaway.lens import follow
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.job import GivenUp, Job
from cutaway.serve.inspect.questions import QUESTIONS
from cutaway.serve.inspect.wire import Answer
from cutaway.serve.inspect.words import Words

pytestmark = pytest.mark.unchecked

MODELS = ["tiny-gpt", "tiny-llama", "tiny-t5", "tiny-bert", "tiny-gemma", "tiny-mla", "tiny-moe"]


def inspector(name: str, **how: Any) -> Inspector:
    model = ct.build(name, seed=0)
    two = len(model.stacks) > 1
    return Inspector(model, Words(model.config.vocab_size, None, 0 if two else None), name=name, **how)


def look_at(of: Inspector, length: int = 9, **edits: Any) -> dict[str, Any]:
    look: dict[str, Any] = {"tokens": torch.randint(of.config.vocab_size, (length,)).tolist(), "edits": edits}
    if len(of.model.stacks) > 1:
        look["source"] = torch.randint(of.config.vocab_size, (7,)).tolist()
    return look


def ask(of: Inspector, question: str, **given: Any) -> Answer:
    return QUESTIONS[question].model_validate_json(json.dumps(given)).answer(of, Job())


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
                ask(of, "stage", look=look, site=site, at=4, source_at=2)
            without += 1
            continue
        answer = ask(of, "stage", look=look, site=site, at=4, source_at=2)
        assert load(answer.packed()).keys() == answer.arrays.keys()
        assert answer.facts["formulas"] or site.endswith("position"), site
        if not answer.facts["python"]:
            continue
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(answer.facts["python"], names)
        theirs, ours = names["values"].as_subclass(Tensor).float(), answer.arrays["values"]
        if "hidden" in answer.arrays:
            ours = ours.masked_fill(answer.arrays["hidden"], -torch.inf)
        if site.endswith(".mask"):
            ours = (ours == -torch.inf).float()
        if site in ("logits", "softmax"):
            theirs = theirs[answer.facts["tokens"]]
        assert theirs.shape == ours.shape, site
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda text, site=site: f"{site}: {text}")
        told += 1
    assert told > len(of.sites)
    assert without < len(of.sites) / 4


@pytest.mark.parametrize("name", MODELS)
def test_a_lane_is_the_library_s_journey(name: str) -> None:
    of = inspector(name)
    look = look_at(of)
    told = ask(of, "lane", look=look, at=5, source_at=3).facts
    journey = follow(of.model, row(look["tokens"]), row(look.get("source")), at=5, source_at=3)
    known = {stage.site: stage for stage in journey.stages}
    assert [each["site"] for each in told["stages"]][:1] == [next(iter(of.sites))]
    for each in told["stages"]:
        stage = known[each["site"]]
        assert each["norm"] == pytest.approx(stage.norm, rel=1e-6)
        assert each["share"] == (None if stage.share is None else pytest.approx(stage.share, rel=1e-6))
        assert each["cosine"] == (None if stage.cosine is None else pytest.approx(stage.cosine, abs=1e-6))
        assert [(top["token"], pytest.approx(top["share"], rel=1e-5)) for top in each["top"]] == list(stage.top)
    assert told["sum_error"] == journey.sum_error


@pytest.mark.parametrize("name", MODELS)
def test_proofs_hold(name: str) -> None:
    of = inspector(name)
    told = ask(of, "proof", look=look_at(of)).facts
    assert told["rows"] < 1e-6
    assert told["sum"] is None or told["sum"] < 1e-6
    assert told["steps"] is None or told["steps"] < 1e-5 * max(1.0, told["logit"])


def test_the_next_token_s_chances_are_what_generation_draws_from() -> None:
    of = inspector("tiny-llama")
    look = look_at(of)
    told = ask(of, "next", look=look, at=8, temperature=0.7, top_k=10).facts
    logits = of.model(row(look["tokens"]))[0, 8].detach()
    share, warm = logits.softmax(-1), (logits / 0.7).softmax(-1)
    best = share.topk(5)
    assert [each["token"] for each in told["top"]] == best.indices.tolist()
    assert [each["share"] for each in told["top"]] == pytest.approx(best.values.tolist(), rel=1e-5)
    left = warm.topk(10).values.sum()
    assert [each["drawn"] for each in told["top"]] == pytest.approx((warm[best.indices] / left).tolist(), rel=1e-4)
    assert told["kept"] == 10
    assert told["sum"] == pytest.approx(1.0, abs=1e-5)


def test_edits_are_part_of_what_is_looked_at() -> None:
    of = inspector("tiny-gpt")
    plain = look_at(of)
    skipped = plain | {"edits": {"blocks.1": "skip"}}
    one, other = (ask(of, "lane", look=look, at=8).facts["stages"][-1] for look in (plain, skipped))
    assert one["site"] == other["site"] == "final_norm"
    assert one["norm"] != other["norm"]
    assert len(of.passes) == 2
    with ct.edit(of.model, skipped["edits"]):
        journey = follow(of.model, row(plain["tokens"]), at=8)
    assert other["norm"] == pytest.approx(journey.stages[-2].norm)
    again = ask(of, "lane", look=plain, at=8).facts["stages"][-1]
    assert again == one


def test_what_is_kept_is_bounded_and_what_is_not_kept_is_read_again() -> None:
    whole, tight = inspector("tiny-llama"), inspector("tiny-llama", limit=60_000)
    look = look_at(whole)
    for site in ("blocks.1.attn.q", "blocks.2.ffn.hidden", "blocks.3.attn.pattern"):
        one, other = (ask(of, "stage", look=look, site=site, at=3).arrays["values"] for of in (whole, tight))
        assert torch.equal(one, other)
    for _ in range(5):
        ask(tight, "stream", look=look_at(tight))
    assert len(tight.passes) < 3


def test_work_that_nobody_waits_for_ends() -> None:
    of, job = inspector("tiny-gpt"), Job()
    job.stop.set()
    with pytest.raises(GivenUp):
        QUESTIONS["stream"](look=look_at(of)).answer(of, job)
    assert not of.passes
    assert ask(of, "stream", look=look_at(of)).arrays["decoder"].shape == (5, 9)


@pytest.mark.parametrize(
    ("question", "given", "said"),
    [
        ("stage", {"site": "blocks.0.attn.nothing", "at": 0}, "no stage of this model"),
        ("stage", {"site": "blocks.0.attn.q", "at": 9}, "place 9 is none"),
        ("next", {"at": 9}, "9 is none"),
        ("lane", {"at": 9}, "at"),
    ],
)
def test_what_cannot_be_asked_is_told(question: str, given: dict[str, Any], said: str) -> None:
    of = inspector("tiny-gpt")
    with pytest.raises(InputError, match=said):
        ask(of, question, look=look_at(of), **given)
    with pytest.raises(InputError, match="vocabulary ends at 256"):
        ask(of, "stream", look={"tokens": [1, 257]})
    with pytest.raises(InputError, match="reads no source"):
        ask(of, "stream", look={"tokens": [1], "source": [1]})
