"""What the page writes is what `generate` writes, and what it says of each choice is so."""

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
def test_it_writes_what_generate_writes(python: Inspector, settings: dict[str, Any]) -> None:
    text = "def add(a, b):\n    return"
    told = ct.generate(ct.load("tiny-python", dtype=torch.float32), text, max_new_tokens=12, **settings)[0]
    tokens = python.tokenizer.encode(text)
    facts, _, parts = run_query_with_partials(
        python,
        "generate",
        input={"tokens": tokens},
        num_prompt_tokens=len(tokens),
        num_tokens=12,
        max_new_tokens=12,
        **settings,
    )
    written = [part["step"]["token"] for part in parts]
    assert written == told.tokens
    assert "".join(part["step"]["text"] for part in parts) == told.text
    assert facts["finish_reason"] == told.finish_reason
    assert (
        facts["cache_check"]["max_abs_diff"]
        <= facts["cache_check"]["tolerance"]
        == pytest.approx(1e-5 * facts["cache_check"]["max_abs_logit"])
    )
    assert facts["cache_check"]["num_compared"] == len(written)


def test_it_can_be_stopped_and_gone_on_with(python: Inspector) -> None:
    tokens, how = python.tokenizer.encode("import os\n"), {"max_new_tokens": 12, "temperature": 1.0, "seed": 5}
    _, _, parts = run_query_with_partials(
        python, "generate", input={"tokens": tokens}, num_prompt_tokens=len(tokens), num_tokens=12, **how
    )
    whole = [part["step"]["token"] for part in parts]
    written: list[int] = []
    while len(written) < len(whole):
        _, _, parts = run_query_with_partials(
            python, "generate", input={"tokens": tokens + written}, num_prompt_tokens=len(tokens), num_tokens=5, **how
        )
        written += [part["step"]["token"] for part in parts]
    assert written == whole


def test_each_choice_is_told_as_it_was(python: Inspector) -> None:
    tokens = python.tokenizer.encode("for x in ")
    given = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 20, "seed": 2}
    _, arrays, parts = run_query_with_partials(
        python, "generate", input={"tokens": tokens}, num_prompt_tokens=len(tokens), num_tokens=6, **given
    )
    read = list(tokens)
    for part in parts:
        choice = part["step"]
        with torch.no_grad():
            logits = python.model(torch.tensor([read]))[0, -1].float()
        shares = logits.softmax(-1)
        assert choice["probability"] == pytest.approx(float(shares[choice["token"]]), rel=1e-3)
        assert choice["entropy"] == pytest.approx(float(-(shares * shares.log2()).sum()), abs=1e-3)
        assert choice["rank"] == int((logits > logits[choice["token"]]).sum()) + 1 <= 20
        assert choice["num_candidates"] == 20
        assert [each["token"] for each in choice["top_tokens"]] == logits.topk(5).indices.tolist()
        kept = (logits / 1.5).where(logits >= logits.topk(20).values[-1], -torch.inf).softmax(-1)
        assert choice["sampling_probability"] == pytest.approx(float(kept[choice["token"]]), rel=1e-3)
        assert choice["cache"]["length"] == len(read)
        read.append(choice["token"])
    assert len(arrays["max_abs_diff"]) == 6


def test_the_cache_is_the_real_one() -> None:
    of = open_inspector("tiny-gemma")
    windows = of.model.stacks["decoder"].windows
    tokens = random_token_ids(20, of.config.vocab_size)
    facts, _, parts = run_query_with_partials(
        of, "generate", input={"tokens": tokens}, num_prompt_tokens=20, num_tokens=40, max_new_tokens=40
    )
    assert facts["cache_kind"] == "ring"
    last = parts[-1]["step"]["cache"]
    slots = dict(zip(windows, last["slots"], strict=True))
    ring = min(slots.values())
    assert ring < facts["num_slots"] == slots[None] == 60
    assert last["length"] == 59
    assert sorted(last["slot_positions"][str(ring)]) == list(range(59 - ring, 59))
    assert last["slot_positions"].keys() == {str(ring)}
    cache = of.model.new_cache(1, 60)
    assert sum(last["bytes"]) < sum(each.numel() * 4 for layer in cache.layers for each in (layer.k, layer.v))
    per = [(layer.k[0, 0].numel() + layer.v[0, 0].numel()) * 4 for layer in cache.layers]
    assert last["bytes"] == [each * count for each, count in zip(per, last["num_filled"], strict=True)]
    assert last["num_filled"] == [min(59, room) for room in last["slots"]]


def test_slots_are_where_the_cache_says() -> None:
    model = ct.build("tiny-gemma", seed=0)
    window = next(each for each in model.stacks["decoder"].windows if each is not None)
    cache = model.new_cache(1, 64, chunk_size=4)
    ring = window + 3
    for _ in range(8):
        _, steps = cache.assign_slots(4, None)
        model(torch.randint(100, (1, 4)), cache=cache)
        assert (
            slot_positions(cache, ring) == steps[ring].key_positions.position[0, : int(cache.seq_lens)].tolist()[:ring]
        )


def test_an_encoder_decoder_writes_from_its_source() -> None:
    of = open_inspector("tiny-t5")
    source = of.tokenizer.encode_source("a text")
    start = of.tokenizer.encode("")
    facts, _, parts = run_query_with_partials(
        of,
        "generate",
        input={"tokens": start, "source": source},
        num_prompt_tokens=1,
        num_tokens=8,
        max_new_tokens=8,
        seed=1,
    )
    read = list(start)
    for part in parts:
        with torch.no_grad():
            assert part["step"]["token"] == int(of.model(torch.tensor([source]), torch.tensor([read]))[0, -1].argmax())
        read.append(part["step"]["token"])
    assert len(read) == 9
    assert facts["cache_check"]["max_abs_diff"] <= 1e-4
    assert parts[0]["step"]["cache"]["source_bytes"] > 0


def test_edits_are_part_of_what_writes(python: Inspector) -> None:
    tokens, edits = python.tokenizer.encode("def f("), {"blocks.0": "skip"}
    given = {
        "input": {"tokens": tokens, "edits": edits},
        "num_prompt_tokens": len(tokens),
        "num_tokens": 4,
        "max_new_tokens": 4,
    }
    facts, _, parts = run_query_with_partials(python, "generate", **given)
    with ct.edit(python.model, edits), torch.no_grad():
        assert parts[0]["step"]["token"] == int(python.model(torch.tensor([tokens]))[0, -1].argmax())
    assert facts["cache_check"]["max_abs_diff"] <= 1e-4


def test_encoders_fill_masks() -> None:
    of = open_inspector("tiny-bert")
    with pytest.raises(InputError, match="does not write"):
        run_query(of, "generate", input={"tokens": [1]}, num_prompt_tokens=1)
    assert run_query(of, "fill_mask", text="a")[0] == {"mask_token": None, "can_fill_mask": False, "predictions": []}


def test_masks_are_filled_as_the_library_does(tmp_path: Path) -> None:
    write_bert_files(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    config = {**ct.config("tiny-bert").model_dump(mode="json"), "vocab_size": tokenizer.vocab_size}
    model = ct.build(config, seed=0)
    of = Inspector(model, TokenizerAdapter(tokenizer.vocab_size, tokenizer))
    text = "The [MASK] was without [MASK]."
    facts, _ = run_query(of, "fill_mask", text=text)
    told = fill_mask(model, tokenizer, [text])[0]
    assert [[each["token"] for each in one] for one in facts["predictions"]] == [
        [each.id for each in one] for one in told
    ]
    assert facts["predictions"][1][0]["probability"] == pytest.approx(told[1][0].probability)
    assert run_query(of, "fill_mask", text="no")[0] == {
        "mask_token": "[MASK]",
        "can_fill_mask": True,
        "predictions": [],
    }


def test_what_cannot_be_written(python: Inspector) -> None:
    with pytest.raises(InputError, match="there are 2 tokens"):
        run_query(python, "generate", input={"tokens": [1, 2]}, num_prompt_tokens=3)
    with pytest.raises(InputError, match="no masks"):
        run_query(python, "fill_mask", text="x")
    with pytest.raises(InputError):
        run_query(python, "generate", input={"tokens": [1] * 2000}, num_prompt_tokens=2000)
