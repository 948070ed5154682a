"""Comparison of two texts: the differences equal those of traced runs, patches equal runs with `ct.edit`."""

import contextlib
import io
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nightly import nightly_except
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import cutaway as ct
from cutaway.config import to_dict
from cutaway.errors import InputError
from cutaway.lens.analysis import activation_patching, direct_logit_attribution
from cutaway.lens.analysis.token_alignment import align_tokens
from cutaway.pretrained import load_examples
from cutaway.serve.inspect.inspector import Inspector, build_inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.protocol import PARTIAL, PROGRESS, QueryCancelled, QueryJob, QueryResult
from cutaway.serve.inspect.queries import QUERIES

pytestmark = pytest.mark.unchecked
CLEAN, CHANGED = "The girl was sad because", "The boy was sad because"


@pytest.fixture(scope="module")
def inspector() -> Inspector:
    return build_inspector(ct.load("tiny-english", dtype=torch.float32), name="tiny-english")


def run_query(inspector: Inspector, name: str, job: QueryJob | None = None, **params: object) -> QueryResult:
    return QUERIES[name].model_validate_json(json.dumps(params)).run(inspector, job or QueryJob())


def pair_params(inspector: Inspector, clean: str = CLEAN, changed: str = CHANGED) -> dict[str, Any]:
    tokens, changed_tokens = (inspector.tokenizer.encode(text) for text in (clean, changed))
    return {"input": {"tokens": tokens}, "changed": {"tokens": changed_tokens}, "position": len(tokens) - 1}


def test_answers_and_logit_differences_are_those_of_the_model(inspector: Inspector) -> None:
    params = pair_params(inspector)
    data: Mapping[str, Any] = run_query(inspector, "compare_texts", **params).data
    assert [answer["text"] for answer in data["answers"]] == [" she", " he"]
    she, he = (answer["token"] for answer in data["answers"])
    for run, model_input in (("clean", params["input"]), ("changed", params["changed"])):
        with torch.no_grad():
            logits = inspector.model(torch.tensor([model_input["tokens"]]))[0, -1]
        assert data[run]["logit_difference"] == pytest.approx(float(logits[she] - logits[he]), abs=1e-4)
        top = logits.softmax(-1).topk(5)
        assert [token["token"] for token in data[run]["top_tokens"]] == top.indices.tolist()
        assert data[run]["top_tokens"][0]["probability"] == pytest.approx(float(top.values[0]), abs=1e-5)
    assert data["is_patching_fast"]
    metric: Mapping[str, Any] = run_query(inspector, "patching_metric", **params).data
    assert (metric["answer"], metric["incorrect"]) == tuple(data["answers"])
    assert [metric[run] for run in ("clean", "changed")] == [
        pytest.approx(data[run]["logit_difference"]) for run in ("clean", "changed")
    ]
    assert metric["problem"] is None


def test_residual_and_attention_differences_are_those_of_traces(inspector: Inspector) -> None:
    params = pair_params(inspector)
    traces = []
    for model_input in (params["input"], params["changed"]):
        with torch.no_grad(), ct.trace(inspector.model, "embed", "resid_post", "attn.pattern") as t:
            inspector.model(torch.tensor([model_input["tokens"]]))
        traces.append(t)
    streams = run_query(inspector, "compare_residual_streams", **params)
    clean, changed = (t["blocks.3.resid_post"][0] for t in traces)
    expected = (clean - changed).norm(dim=-1) / clean.norm(dim=-1)
    torch.testing.assert_close(streams.tensors["decoder"][4], expected.as_subclass(Tensor), atol=1e-5, rtol=1e-4)
    lens: Mapping[str, Any] = run_query(inspector, "compare_logit_lens", **params).data
    metric = run_query(inspector, "patching_metric", **params).data
    for run, text in (("clean", " she"), ("changed", " he")):
        assert lens[run][-1]["text"] == text
        assert lens[run][-1]["metric"] == pytest.approx(metric[run], abs=1e-4)
    distances = run_query(inspector, "compare_attention", **params).tensors["attn"]
    rows = [t["blocks.5.attn.pattern"][0, :, -1].as_subclass(Tensor) for t in traces]
    torch.testing.assert_close(distances[5], (rows[0] - rows[1]).abs().sum(-1) / 2, atol=1e-5, rtol=1e-4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("component", ["resid", "attn.out", "ffn.out", "attn.z"])
def test_maps_equal_the_analysis_with_full_forward_passes(inspector: Inspector, component: str, reverse: bool) -> None:
    params = pair_params(inspector)
    result = run_query(
        inspector, "activation_patching", **params, stack="decoder", component=component, reverse=reverse
    )
    shares = result.tensors["shares"]
    site = "resid_pre" if component == "resid" else component
    texts = (CHANGED, CLEAN) if reverse else (CLEAN, CHANGED)
    tokens = (" she", " he")
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    expected = activation_patching(
        checkpoint, *texts, tokens[0], incorrect_token=tokens[1], site=site, by_head=component.endswith(".z")
    ).values
    torch.testing.assert_close(shares[: len(expected)], expected, atol=2e-5, rtol=1e-4)
    if component == "resid":  # the last row is after the last block: only the selected token decides
        assert shares[-1].tolist() == pytest.approx([0, 0, 0, 0, 1], abs=1e-5)


@pytest.mark.parametrize(
    ("tokens", "reverse"),
    nightly_except(
        [((), False), ((" very",), True), ((" not", " a"), False)],
        itertools.product([(), (" very",), (" not", " a")], [False, True]),
    ),
)
def test_map_of_texts_with_the_same_answer_equals_edited_runs(
    inspector: Inspector, tokens: tuple[str, ...], reverse: bool
) -> None:
    """The default metric is the log-probability of the token whose probability changes most, here the answer."""
    params = pair_params(inspector, "The girl was", "The king was")
    clean, changed = (torch.tensor([params[name]["tokens"]]) for name in ("input", "changed"))
    names = ("answer_token", "incorrect_token")
    chosen = {name: inspector.tokenizer.encode(text)[-1] for name, text in zip(names, tokens, strict=False)}
    metric: Mapping[str, Any] = run_query(inspector, "patching_metric", **params, **chosen).data
    texts = [token["text"] for token in (metric["answer"], metric["incorrect"]) if token]
    assert texts == list(tokens or (" very",))
    ids = [token["token"] for token in (metric["answer"], metric["incorrect"]) if token]

    def measure(logits: Tensor) -> float:
        log_probabilities = logits.log_softmax(-1)[ids].tolist()  # their difference is the logit difference
        return log_probabilities[0] if len(ids) == 1 else log_probabilities[0] - log_probabilities[1]

    with torch.no_grad():
        assert metric["clean"] == pytest.approx(measure(inspector.model(clean)[0, -1]), abs=1e-4)
        assert metric["changed"] == pytest.approx(measure(inspector.model(changed)[0, -1]), abs=1e-4)
    start, end = (metric["clean"], metric["changed"]) if reverse else (metric["changed"], metric["clean"])
    donor, receiver = (changed, clean) if reverse else (clean, changed)
    result = run_query(
        inspector, "activation_patching", **params, **chosen, stack="decoder", component="resid", reverse=reverse
    )
    sites: Any = result.data["sites"]
    with torch.no_grad(), ct.trace(inspector.model, *sites) as t:
        inspector.model(donor)
    for row, site in enumerate(sites):
        for position in range(3):
            value = t[site].as_subclass(Tensor)[:, [position]]
            edits: dict[str, Any] = {site: {"do": "replace", "value": value, "positions": [position]}}
            with torch.no_grad(), ct.edit(inspector.model, edits):
                patched = measure(inspector.model(receiver)[0, -1])
            expected = (patched - start) / (end - start)
            assert float(result.tensors["shares"][row, position]) == pytest.approx(expected, abs=1e-3), (site, position)
    patches = [{"site": "blocks.2.ffn.out", "position": 1}]
    effect: Mapping[str, Any] = run_query(
        inspector, "patch_effect", **params, **chosen, patches=patches, reverse=reverse
    ).data
    assert run_python(effect["python_code"]) == pytest.approx(effect["metric"], abs=1e-3)
    kind = "logit difference, ' not' minus ' a'" if len(ids) == 2 else "log-probability of ' very'"
    assert f"# metric: {kind}\n" in effect["python_code"]


def test_head_outputs_at_the_selected_position(inspector: Inspector) -> None:
    params = pair_params(inspector)
    result = run_query(
        inspector, "activation_patching", **params, stack="decoder", component="attn.z", at_position=True
    )
    clean, changed = (torch.tensor([params[name]["tokens"]]) for name in ("input", "changed"))
    with torch.no_grad(), ct.trace(inspector.model, "blocks.5.attn.z") as t:
        inspector.model(clean)
    z = t["blocks.5.attn.z"].as_subclass(Tensor)[:, [4]][:, :, [0]]
    edits: dict[str, Any] = {"blocks.5.attn.z": {"do": "replace", "value": z, "positions": [4], "heads": [0]}}
    with torch.no_grad(), ct.edit(inspector.model, edits):
        patched = difference(inspector.model(changed)[0, -1], inspector)
    with torch.no_grad():
        start, end = (difference(inspector.model(tokens)[0, -1], inspector) for tokens in (changed, clean))
    assert float(result.tensors["shares"][5, 0]) == pytest.approx((patched - start) / (end - start), abs=1e-5)


def difference(logits: Tensor, inspector: Inspector) -> float:
    she, he = (inspector.tokenizer.encode(text)[-1] for text in (" she", " he"))
    return float(logits[she] - logits[he])


FORMS = {
    "tiny-gpt": None, "tiny-llama": None, "tiny-moe": None, "tiny-mla": None, "tiny-gemma": None, "tiny-bert": None,
    "shared blocks": None, "tiny-t5": (2, 7, 3, 9), "tiny-bart": (2, 7, 3, 9),
}  # fmt: skip


def untrained(preset: str, *, has_same_answers: bool = False) -> tuple[Inspector, dict[str, Any]]:
    config = ct.config("tiny-bert" if preset == "shared blocks" else preset)
    if preset == "shared blocks":
        config = ct.config({**to_dict(config), "encoder": {**to_dict(config)["encoder"], "layer_groups": 1}})
    model, source = ct.build(config, seed=0), FORMS[preset]
    adapter = TokenizerAdapter(model.config.vocab_size, decoder_start_token_id=None if source is None else 0)
    inspector = Inspector(model, adapter, name=preset)
    rng = random.Random(1)
    for _ in range(200):  # a pair for which the metric changes
        clean: dict[str, Any] = {"tokens": [rng.randrange(model.config.vocab_size) for _ in range(6)]}
        changed = {"tokens": list(clean["tokens"])}
        for index in (1, 3):  # with random weights, the answer depends most on the selected token, 3
            changed["tokens"][index] = rng.randrange(model.config.vocab_size)
        if source is not None:
            clean["source"] = [rng.randrange(model.config.vocab_size) for _ in range(4)]
            changed["source"] = [rng.randrange(model.config.vocab_size) for _ in range(4)]
        params = {"input": clean, "changed": changed, "position": 3}
        metric: Mapping[str, Any] = run_query(inspector, "patching_metric", **params).data
        if metric["problem"] is None and (metric["incorrect"] is None) == has_same_answers:
            return inspector, params
    raise AssertionError("no pair of random texts has such answers")


@pytest.mark.parametrize(
    ("preset", "has_same_answers"),
    nightly_except(  # random texts with the same answer are rare for the others
        [*((preset, False) for preset in FORMS), ("tiny-gpt", True), ("tiny-bert", True), ("tiny-mla", True)],
        itertools.product(FORMS, [False, True]),
    ),
)
def test_patching_everything_restores_the_clean_metric_and_nothing_leaves_it(
    preset: str, has_same_answers: bool
) -> None:
    inspector, params = untrained(preset, has_same_answers=has_same_answers)
    data: Mapping[str, Any] = run_query(inspector, "patching_metric", **params).data
    prefixes = ["encoder.", "decoder."] if FORMS[preset] else [""]
    everything = [{"site": f"{prefix}blocks.0.resid_pre"} for prefix in prefixes]
    for reverse, (donor, receiver) in ((False, ("clean", "changed")), (True, ("changed", "clean"))):
        effect = run_query(inspector, "patch_effect", **params, patches=everything, reverse=reverse).data
        assert effect["metric"] == pytest.approx(data[donor], abs=1e-4)
        assert effect["share"] == pytest.approx(1, abs=1e-4)
        effect = run_query(inspector, "patch_effect", **params, patches=[], reverse=reverse).data
        assert effect["metric"] == pytest.approx(data[receiver], abs=1e-4)
        assert effect["share"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("preset", FORMS)
def test_cells_of_every_map_equal_their_python_code(preset: str) -> None:
    inspector, params = untrained(preset)
    data: Mapping[str, Any] = run_query(inspector, "compare_texts", **params).data
    rng = random.Random(0)
    assert len(data["maps"]) >= 4 * len(inspector.model.stacks)
    for patch_map in data["maps"]:
        result = run_query(inspector, "activation_patching", **params, **patch_map)
        shares, sites, pairs = result.tensors["shares"], result.data["sites"], result.data["pairs"]
        assert isinstance(sites, list)
        assert isinstance(pairs, list)
        row, column = rng.randrange(len(shares)), rng.randrange(shares.shape[1])
        by_head = patch_map["component"].endswith(".z")
        patch = {"site": sites[row], "head": column} if by_head else {"site": sites[row], "position": pairs[column][0]}
        effect: Mapping[str, Any] = run_query(inspector, "patch_effect", **params, patches=[patch]).data
        assert effect["share"] == pytest.approx(float(shares[row, column]), abs=1e-4), patch
        if preset != "shared blocks":  # the code names a preset
            assert run_python(effect["python_code"]) == pytest.approx(effect["metric"], abs=1e-4), patch


def run_python(code: str) -> float:
    """Number that the code prints as a tensor."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return float(output.getvalue().strip().removeprefix("tensor(").removesuffix(")"))


def test_combined_patches_and_their_python_code(inspector: Inspector) -> None:
    params = pair_params(inspector)
    patches = [
        {"site": "blocks.4.attn.z", "head": 5},
        {"site": "blocks.5.attn.z", "head": 0, "position": 4},
        {"site": "blocks.3.ffn.out", "position": 1},
        {"site": "blocks.5.attn.z", "head": 6},
    ]
    for reverse in (False, True):
        effect: Mapping[str, Any] = run_query(
            inspector, "patch_effect", **params, patches=patches, reverse=reverse
        ).data
        assert run_python(effect["python_code"]) == pytest.approx(effect["metric"], abs=1e-3)


def test_texts_of_different_length_are_aligned(inspector: Inspector) -> None:
    assert align_tokens([1, 2, 3], [1, 9, 3]) == [(0, 0), (1, 1), (2, 2)]
    assert align_tokens([1, 2, 3, 4], [1, 3, 4]) == [(0, 0), (2, 1), (3, 2)]
    assert align_tokens([1, 2, 3, 4, 5], [1, 7, 3, 6, 4, 5]) == [(0, 0), (1, 1), (2, 2), (3, 4), (4, 5)]
    params = pair_params(inspector, CLEAN, "The little boy was sad because")
    data: Mapping[str, Any] = run_query(inspector, "compare_texts", **params).data
    assert data["changed_position"] == 5
    assert len(data["token_pairs"]) < 5
    patches = [{"site": "blocks.5.resid_post", "position": 4}]
    effect: Mapping[str, Any] = run_query(inspector, "patch_effect", **params, patches=patches).data
    assert effect["share"] == pytest.approx(1, abs=1e-5)
    assert run_python(effect["python_code"]) == pytest.approx(effect["metric"], abs=1e-3)
    with pytest.raises(InputError, match="token 1 of the text has no counterpart"):
        run_query(inspector, "compare_texts", **params | {"position": 1})
    with pytest.raises(InputError, match="no counterpart in the changed text; patch an aligned token"):
        run_query(inspector, "patch_effect", **params, patches=[{"site": "blocks.0.attn.out", "position": 1}])


def test_texts_without_aligned_tokens_are_explained(inspector: Inspector) -> None:
    params = pair_params(inspector, "One day, a little boy", "Tom was sad because he")
    data: Mapping[str, Any] = run_query(inspector, "compare_texts", **params).data
    assert (data["token_pairs"], data["maps"]) == ([], [])
    problem = run_query(inspector, "patching_metric", **params).data["problem"]
    expected = (
        "the texts share no aligned tokens, so no activation can be copied; use the same text with one word changed"
    )
    assert problem == expected
    for component in ("resid", "attn.out", "attn.z"):
        with pytest.raises(InputError, match=expected):
            run_query(inspector, "activation_patching", **params, stack="decoder", component=component)
    with pytest.raises(InputError, match=expected):
        run_query(inspector, "patch_effect", **params, patches=[{"site": "blocks.0.attn.z"}])


def test_sources_without_aligned_tokens_leave_the_maps_of_the_decoder() -> None:
    inspector, params = untrained("tiny-t5")
    assert "encoder" in {item["stack"] for item in patch_maps(inspector, params)}
    tokens = (token for token in range(inspector.config.vocab_size) if token not in params["input"]["source"])
    params["changed"]["source"] = [next(tokens) for _ in range(5)]
    assert run_query(inspector, "compare_texts", **params).data["source_pairs"] == []
    assert run_query(inspector, "patching_metric", **params).data["problem"] is None
    assert {item["stack"] for item in patch_maps(inspector, params)} == {"decoder"}
    result = run_query(inspector, "activation_patching", **params, stack="decoder", component="resid")
    assert result.tensors["shares"].isfinite().all()
    with pytest.raises(InputError, match="the inputs of the encoder share no aligned tokens"):
        run_query(inspector, "activation_patching", **params, stack="encoder", component="resid")
    with pytest.raises(InputError, match=r"encoder\.blocks\.0\.attn\.out has no aligned tokens"):
        run_query(inspector, "patch_effect", **params, patches=[{"site": "encoder.blocks.0.attn.out"}])


def patch_maps(inspector: Inspector, params: dict[str, Any]) -> list[dict[str, str]]:
    data: Mapping[str, Any] = run_query(inspector, "compare_texts", **params).data
    maps: list[dict[str, str]] = data["maps"]
    return maps


def test_rows_are_sent_as_they_are_measured_and_the_map_is_cached(inspector: Inspector) -> None:
    params = pair_params(inspector, "The birds in the park", "The bird in the park")
    frames: list[int] = []
    job = QueryJob(lambda frame: frames.append(frame[4]))
    patch_map = {"stack": "decoder", "component": "ffn.out"}
    first = run_query(inspector, "activation_patching", job, **params, **patch_map)
    assert frames.count(PARTIAL) == 6
    assert frames.count(PROGRESS) == 6
    frames.clear()
    second = run_query(inspector, "activation_patching", job, **params, **patch_map)
    assert not frames
    assert second is first
    job = QueryJob()
    job.cancelled.set()
    with pytest.raises(QueryCancelled):
        run_query(inspector, "activation_patching", job, **params, stack="decoder", component="attn.out")


def test_what_cannot_be_patched_is_explained(inspector: Inspector) -> None:
    params = pair_params(inspector, CLEAN, CLEAN)
    problem = run_query(inspector, "patching_metric", **params).data["problem"]
    assert problem == "both texts are equal, so there is no difference to restore; change a word of the changed text"
    with pytest.raises(InputError, match="no difference to restore"):
        run_query(inspector, "patch_effect", **params, patches=[])
    params = pair_params(inspector)
    tokens = {"answer_token": 7, "incorrect_token": 7}
    assert "so it is always 0; choose two tokens" in str(
        run_query(inspector, "patching_metric", **params, **tokens).data
    )
    with pytest.raises(InputError, match="answer_token is 100000; the vocabulary has"):
        run_query(inspector, "patching_metric", **params, answer_token=100_000)
    with pytest.raises(InputError, match="incorrect_token is set, but answer_token is not; pass both"):
        run_query(inspector, "patching_metric", **params, incorrect_token=7)
    # The selected token is the same and does not see the later one, so that the predictions are equal.
    params = pair_params(inspector, "The girl was sad", "The girl was happy") | {"position": 2}
    problem = str(run_query(inspector, "patching_metric", **params).data["problem"])
    assert problem.startswith("the metric changes by only 0.0000 between the two texts")
    long = {"input": {"tokens": [5] * 257}, "changed": {"tokens": [6] * 257}, "position": 256}
    assert "for up to 256; use a shorter text" in str(run_query(inspector, "patching_metric", **long).data)
    edited = {**pair_params(inspector)["input"], "edits": {"blocks.0": "skip"}}
    with pytest.raises(InputError, match="remove the edits"):
        run_query(inspector, "compare_texts", **pair_params(inspector) | {"input": edited})
    with pytest.raises(InputError, match=r"no cross\.out in the decoder"):
        run_query(inspector, "activation_patching", **pair_params(inspector), stack="decoder", component="cross.out")


def test_long_texts_are_patched_from_the_first_difference_on(inspector: Inspector) -> None:
    story = "Once upon a time, there was a dog. The dog was big. " * 6
    params = pair_params(inspector, f"{story}{CLEAN}", f"{story}{CHANGED}")
    result = run_query(inspector, "activation_patching", **params, stack="decoder", component="resid")
    assert len(params["input"]["tokens"]) > 64
    pairs: Any = result.data["pairs"]
    assert len(pairs) == 4
    assert float(result.tensors["shares"][0, 0]) == pytest.approx(1, abs=1e-4)


def test_attribution_differences_of_the_page_equal_the_library(inspector: Inspector) -> None:
    """The page subtracts the contributions to both answers, which is the attribution of the logit difference."""
    params = pair_params(inspector)
    answers: Any = run_query(inspector, "compare_texts", **params).data["answers"]
    own, other = (
        run_query(inspector, "logit_attribution", input=params["input"], position=4, token=answer["token"]).data[
            "attribution_sum"
        ]
        for answer in answers
    )
    checkpoint = ct.load("tiny-english", dtype=torch.float32)
    expected = direct_logit_attribution(checkpoint, CLEAN, " she", incorrect_token=" he").values.sum()
    assert isinstance(own, float)
    assert isinstance(other, float)
    assert own - other == pytest.approx(float(expected), abs=1e-3)


@pytest.mark.parametrize("name", ["tiny-english", "tiny-english-encoder", "tiny-dates", "tiny-python"])
def test_answers_of_the_example_pairs_differ(name: str) -> None:
    inspector = build_inspector(ct.load(name, dtype=torch.float32), name=name)
    examples = [item["fragment"] for item in load_examples(name) if item["fragment"]["screen"] == "compare"]
    assert len(examples) >= {"tiny-english": 4, "tiny-english-encoder": 3}.get(name, 2)
    tokenizer = inspector.tokenizer
    for fragment in examples:
        if "source" in fragment:
            target = tokenizer.encode(fragment["text"])
            sources = [tokenizer.encode_source(fragment[key]) for key in ("source", "changed")]
            inputs = [{"tokens": target, "source": source} for source in sources]
        else:
            inputs = [{"tokens": tokenizer.encode(fragment[key])} for key in ("text", "changed")]
        position = int(fragment.get("position", len(inputs[0]["tokens"]) - 1))
        if tokenizer.mask_token_id is not None:
            position = inputs[0]["tokens"].index(tokenizer.mask_token_id)
        data: Mapping[str, Any] = run_query(
            inspector, "compare_texts", input=inputs[0], changed=inputs[1], position=position
        ).data
        assert data["clean"]["logit_difference"] > 0.5 > -0.5 > data["changed"]["logit_difference"], fragment


SUGGESTIONS = {
    "tiny-english": ["The dog ran to the", "The king was"],
    "tiny-english-encoder": ["The [MASK] ran to the park."],
    "tiny-dates": ["12 Nisan 1832"],
}


@pytest.mark.parametrize("name", SUGGESTIONS)
def test_a_suggested_text_replaces_one_word_or_number(name: str) -> None:
    inspector = build_inspector(ct.load(name, dtype=torch.float32), name=name)
    tokenizer = inspector.tokenizer
    for text in SUGGESTIONS[name]:
        model_input: dict[str, Any] = {"tokens": tokenizer.encode(text)}
        if tokenizer.default_source is not None:
            model_input = {"tokens": tokenizer.encode("1832-"), "source": tokenizer.encode_source(text)}
        position = len(model_input["tokens"]) - 1
        if tokenizer.mask_token_id is not None:
            position = model_input["tokens"].index(tokenizer.mask_token_id)
        params = {"input": model_input, "text": text, "position": position}
        changed = run_query(inspector, "suggest_changed_text", **params).data["changed"]
        assert isinstance(changed, str)
        words, changed_words = text.split(), changed.split()
        assert sum(own != other for own, other in zip(words, changed_words, strict=True)) == 1
        assert max(map(changed_words.count, changed_words)) == max(map(words.count, words)), "a word is repeated"
        assert "[MASK]" in changed_words or "[MASK]" not in words


@pytest.mark.parametrize("preset", ["tiny-english", "tiny-gpt", "tiny-bert", "tiny-t5"])
def test_no_text_is_suggested_without_a_plausible_word(preset: str) -> None:
    model = ct.load(preset, dtype=torch.float32) if preset == "tiny-english" else ct.build(preset, seed=0)
    inspector = build_inspector(model, name=preset)
    text = "cat" if preset == "tiny-english" else "The cat sat on the"
    model_input = {"tokens": inspector.tokenizer.encode(text)}
    if preset == "tiny-t5":
        model_input["source"] = inspector.tokenizer.encode_source(text)
    params = {"input": model_input, "text": text, "position": 0}
    assert run_query(inspector, "suggest_changed_text", **params).data["changed"] is None


def test_map_equals_plain_hooks_on_a_transformers_gpt2(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=3, n_head=2, initializer_range=0.4)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    inspector = Inspector(ct.load(tmp_path, dtype=torch.float32).model, TokenizerAdapter(50), name="gpt2")
    clean, changed = [3, 14, 15, 9, 2], [3, 14, 40, 9, 26]
    params = {"input": {"tokens": clean}, "changed": {"tokens": changed}, "position": 4}
    answers: Any = run_query(inspector, "compare_texts", **params).data["answers"]
    own, other = (answer["token"] for answer in answers)
    stream: dict[int, Tensor] = {}

    def metric(tokens: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        return float(logits[own] - logits[other])

    def record(layer: int) -> Any:
        return lambda module, args: stream.update({layer: args[0].clone()})

    def patch(layer: int, position: int) -> Any:
        def hook(module: Any, args: Any) -> Any:
            patched = args[0].clone()
            patched[0, position] = stream[layer][0, position]
            return (patched, *args[1:])

        return hook

    handles = [block.register_forward_pre_hook(record(layer)) for layer, block in enumerate(model.transformer.h)]
    clean_metric = metric(clean)
    for handle in handles:
        handle.remove()
    changed_metric = metric(changed)
    expected = torch.zeros(3, 5)
    for layer, block in enumerate(model.transformer.h):
        for position in range(5):
            handle = block.register_forward_pre_hook(patch(layer, position))
            expected[layer, position] = (metric(changed) - changed_metric) / (clean_metric - changed_metric)
            handle.remove()
    shares = run_query(inspector, "activation_patching", **params, stack="decoder", component="resid").tensors["shares"]
    torch.testing.assert_close(shares[:3], expected, atol=1e-4, rtol=1e-4)
