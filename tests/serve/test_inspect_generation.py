"""Generation and mask-filling queries equal `generate` and `fill_mask`; the recorded steps are correct."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.inspector import open_inspector, random_token_ids, run_query, run_query_with_partials
from support.tokenizer_files import write_bert_files

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate.fill_mask import fill_mask
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import TokenizerAdapter
from cutaway.serve.inspect.recording_sampler import slot_positions
from cutaway.tokenizer import load_tokenizer

pytestmark = pytest.mark.unchecked

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "seed": 11},
]


@pytest.fixture(scope="module")
def python() -> Inspector:
    return open_inspector("tiny-python")


@pytest.mark.parametrize("settings", SETTINGS)
def test_generate_query_equals_generate(python: Inspector, settings: dict[str, Any]) -> None:
    text = "def add(a, b):\n    return"
    expected = ct.generate(ct.load("tiny-python", dtype=torch.float32), text, max_new_tokens=12, **settings)[0]
    tokens = python.tokenizer.encode(text)
    data, _, partials = run_query_with_partials(
        python,
        "generate",
        input={"tokens": tokens},
        num_prompt_tokens=len(tokens),
        num_tokens=12,
        max_new_tokens=12,
        **settings,
    )
    generated = [partial["step"]["token"] for partial in partials]
    assert generated == expected.tokens
    assert "".join(partial["step"]["text"] for partial in partials) == expected.text
    assert data["finish_reason"] == expected.finish_reason
    assert (
        data["cache_check"]["max_abs_diff"]
        <= data["cache_check"]["tolerance"]
        == pytest.approx(1e-5 * data["cache_check"]["max_abs_logit"])
    )
    assert data["cache_check"]["num_compared"] == len(generated)


def test_generation_in_parts_equals_generation_at_once(python: Inspector) -> None:
    tokens, params = python.tokenizer.encode("import os\n"), {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    _, _, partials = run_query_with_partials(
        python, "generate", input={"tokens": tokens}, num_prompt_tokens=len(tokens), num_tokens=12, **params
    )
    complete = [partial["step"]["token"] for partial in partials]
    generated: list[int] = []
    while len(generated) < len(complete):
        _, _, partials = run_query_with_partials(
            python,
            "generate",
            input={"tokens": tokens + generated},
            num_prompt_tokens=len(tokens),
            num_tokens=5,
            **params,
        )
        generated += [partial["step"]["token"] for partial in partials]
    assert generated == complete


def test_step_statistics_equal_the_forward_pass(python: Inspector) -> None:
    tokens = python.tokenizer.encode("for x in ")
    params = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 20, "seed": 2}
    _, tensors, partials = run_query_with_partials(
        python, "generate", input={"tokens": tokens}, num_prompt_tokens=len(tokens), num_tokens=6, **params
    )
    token_ids = list(tokens)
    for partial in partials:
        step = partial["step"]
        with torch.no_grad():
            logits = python.model(torch.tensor([token_ids]))[0, -1].float()
        probabilities = logits.softmax(-1)
        assert step["probability"] == pytest.approx(float(probabilities[step["token"]]), rel=1e-3)
        assert step["entropy"] == pytest.approx(float(-(probabilities * probabilities.log2()).sum()), abs=1e-3)
        assert step["rank"] == int((logits > logits[step["token"]]).sum()) + 1 <= 20
        assert step["num_candidates"] == 20
        assert [entry["token"] for entry in step["top_tokens"]] == logits.topk(5).indices.tolist()
        sampling_probs = (logits / 1.5).where(logits >= logits.topk(20).values[-1], -torch.inf).softmax(-1)
        assert step["sampling_probability"] == pytest.approx(float(sampling_probs[step["token"]]), rel=1e-3)
        assert step["cache"]["length"] == len(token_ids)
        token_ids.append(step["token"])
    assert len(tensors["max_abs_diff"]) == 6


def test_cache_state_equals_the_ring_buffers() -> None:
    inspector = open_inspector("tiny-gemma")
    windows = inspector.model.stacks["decoder"].windows
    tokens = random_token_ids(20, inspector.config.vocab_size)
    data, _, partials = run_query_with_partials(
        inspector, "generate", input={"tokens": tokens}, num_prompt_tokens=20, num_tokens=40, max_new_tokens=40
    )
    assert data["cache_kind"] == "ring"
    last = partials[-1]["step"]["cache"]
    slots = dict(zip(windows, last["slots"], strict=True))
    ring_size = min(slots.values())
    assert ring_size < data["num_slots"] == slots[None] == 60
    assert last["length"] == 59
    assert sorted(last["slot_positions"][str(ring_size)]) == list(range(59 - ring_size, 59))
    assert last["slot_positions"].keys() == {str(ring_size)}
    cache = inspector.model.new_cache(1, 60)
    assert sum(last["bytes"]) < sum(tensor.numel() * 4 for layer in cache.layers for tensor in (layer.k, layer.v))
    bytes_per_slot = [(layer.k[0, 0].numel() + layer.v[0, 0].numel()) * 4 for layer in cache.layers]
    assert last["bytes"] == [tensor * count for tensor, count in zip(bytes_per_slot, last["num_filled"], strict=True)]
    assert last["num_filled"] == [min(59, num_slots) for num_slots in last["slots"]]


def test_slot_positions_equal_the_cache() -> None:
    model = ct.build("tiny-gemma", seed=0)
    window = next(width for width in model.stacks["decoder"].windows if width is not None)
    cache = model.new_cache(1, 64, chunk_size=4)
    ring_size = window + 3
    for _ in range(8):
        _, steps = cache.assign_slots(4, None)
        model(torch.randint(100, (1, 4)), cache=cache)
        assert (
            slot_positions(cache, ring_size)
            == steps[ring_size].key_positions.position[0, : int(cache.seq_lens)].tolist()[:ring_size]
        )


def test_regular_expression_shows_the_allowed_tokens(python: Inspector) -> None:
    """One query ≡ several, and the recorded tokens are those with a sampling probability."""
    tokenizer = python.tokenizer.tokenizer
    assert tokenizer is not None
    regex, text = r" ?x = [0-9]{3}\n", "def f():\n   "
    expected = ct.generate(ct.load("tiny-python", dtype=torch.float32), text, max_new_tokens=12, regex=regex)[0]
    prompt, generated, steps = tokenizer.encode(text), [], []
    while len(generated) < len(expected.tokens):
        _, _, partials = run_query_with_partials(
            python,
            "generate",
            input={"tokens": prompt + generated},
            num_prompt_tokens=len(prompt),
            num_tokens=2,
            max_new_tokens=12,
            regex=regex,
        )
        steps += [partial["step"] for partial in partials]
        generated = [step["token"] for step in steps]
    assert generated == expected.tokens
    assert "".join(step["text"] for step in steps) == expected.text
    assert steps[-1]["finish_reason"] == "stop"
    for step in steps:
        stats = step["grammar"]
        assert 1 <= stats["num_allowed"] < stats["vocab_size"]
        assert all(token["allowed"] for token in stats["top_tokens"])
        assert step["token"] == max(stats["top_tokens"], key=lambda token: token["probability"])["token"]
        assert stats["probability"] <= 1
        for token in step["top_tokens"]:
            assert token["allowed"] or token["sampling_probability"] == 0
    with pytest.raises(InputError, match="regex cannot be used"):
        run_query_with_partials(
            python, "generate", input={"tokens": prompt}, num_prompt_tokens=len(prompt), regex="(", num_tokens=1
        )


def test_encoder_decoder_generates_from_its_source() -> None:
    inspector = open_inspector("tiny-t5")
    source = inspector.tokenizer.encode_source("a text")
    start = inspector.tokenizer.encode("")
    data, _, partials = run_query_with_partials(
        inspector,
        "generate",
        input={"tokens": start, "source": source},
        num_prompt_tokens=1,
        num_tokens=8,
        max_new_tokens=8,
        seed=1,
    )
    token_ids = list(start)
    for partial in partials:
        with torch.no_grad():
            assert partial["step"]["token"] == int(
                inspector.model(torch.tensor([source]), torch.tensor([token_ids]))[0, -1].argmax()
            )
        token_ids.append(partial["step"]["token"])
    assert len(token_ids) == 9
    assert data["cache_check"]["max_abs_diff"] <= 1e-4
    assert partials[0]["step"]["cache"]["source_bytes"] > 0


def test_edits_apply_to_generation(python: Inspector) -> None:
    tokens, edits = python.tokenizer.encode("def f("), {"blocks.0": "skip"}
    params = {
        "input": {"tokens": tokens, "edits": edits},
        "num_prompt_tokens": len(tokens),
        "num_tokens": 4,
        "max_new_tokens": 4,
    }
    data, _, partials = run_query_with_partials(python, "generate", **params)
    with ct.edit(python.model, edits), torch.no_grad():
        assert partials[0]["step"]["token"] == int(python.model(torch.tensor([tokens]))[0, -1].argmax())
    assert data["cache_check"]["max_abs_diff"] <= 1e-4


def test_encoder_cannot_generate() -> None:
    inspector = open_inspector("tiny-bert")
    with pytest.raises(InputError, match="does not generate"):
        run_query(inspector, "generate", input={"tokens": [1]}, num_prompt_tokens=1)
    assert run_query(inspector, "fill_mask", text="a")[0] == {
        "mask_token": None,
        "can_fill_mask": False,
        "predictions": [],
    }


def test_fill_mask_query_equals_fill_mask(tmp_path: Path) -> None:
    write_bert_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    config = {**ct.config("tiny-bert").model_dump(mode="json"), "vocab_size": tokenizer.vocab_size}
    model = ct.build(config, seed=0)
    inspector = Inspector(model, TokenizerAdapter(tokenizer.vocab_size, tokenizer))
    text = "The [MASK] was without [MASK]."
    data, _ = run_query(inspector, "fill_mask", text=text)
    expected = fill_mask(model, tokenizer, [text])[0]
    assert [[prediction["token"] for prediction in mask] for mask in data["predictions"]] == [
        [prediction.id for prediction in mask] for mask in expected
    ]
    assert data["predictions"][1][0]["probability"] == pytest.approx(expected[1][0].probability)
    assert run_query(inspector, "fill_mask", text="no")[0] == {
        "mask_token": "[MASK]",
        "can_fill_mask": True,
        "predictions": [],
    }


def test_invalid_generation_query_is_an_error(python: Inspector) -> None:
    with pytest.raises(InputError, match="only 2 tokens"):
        run_query(python, "generate", input={"tokens": [1, 2]}, num_prompt_tokens=3)
    with pytest.raises(InputError, match="cannot fill masks"):
        run_query(python, "fill_mask", text="x")
    with pytest.raises(InputError):
        run_query(python, "generate", input={"tokens": [1] * 2000}, num_prompt_tokens=2000)
