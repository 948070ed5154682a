"""What the page writes is what `generate` writes, and what it says of each choice is so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inspecting import asked, heard, ids, opened
from test_text_peers import bert

import cutaway as ct
from cutaway.errors import InputError
from cutaway.generate.fill_mask import fill_mask
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.listener import positions
from cutaway.serve.inspect.words import Words
from cutaway.text import tokenizer_from_directory

pytestmark = pytest.mark.unchecked

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9, "seed": 11},
]


@pytest.fixture(scope="module")
def python() -> Inspector:
    return opened("tiny-python")


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_writes_what_generate_writes(python: Inspector, settings: dict[str, Any]) -> None:
    text = "def add(a, b):\n    return"
    told = ct.generate(ct.load("tiny-python", dtype=torch.float32), text, max_new_tokens=12, **settings)[0]
    tokens = python.words.ids(text)
    facts, _, parts = heard(python, "write", look={"tokens": tokens}, prompt=len(tokens), count=12, most=12, **settings)
    written = [part["choice"]["token"] for part in parts]
    assert written == told.tokens
    assert "".join(part["choice"]["text"] for part in parts) == told.text
    assert facts["reason"] == told.finish_reason
    assert facts["check"]["largest"] <= facts["check"]["promised"] == pytest.approx(1e-5 * facts["check"]["of"])
    assert facts["check"]["compared"] == len(written)


def test_it_can_be_stopped_and_gone_on_with(python: Inspector) -> None:
    tokens, how = python.words.ids("import os\n"), {"most": 12, "temperature": 1.0, "seed": 5}
    _, _, parts = heard(python, "write", look={"tokens": tokens}, prompt=len(tokens), count=12, **how)
    whole = [part["choice"]["token"] for part in parts]
    written: list[int] = []
    while len(written) < len(whole):
        _, _, parts = heard(python, "write", look={"tokens": tokens + written}, prompt=len(tokens), count=5, **how)
        written += [part["choice"]["token"] for part in parts]
    assert written == whole


def test_each_choice_is_told_as_it_was(python: Inspector) -> None:
    tokens = python.words.ids("for x in ")
    given = {"most": 6, "temperature": 1.5, "top_k": 20, "seed": 2}
    _, arrays, parts = heard(python, "write", look={"tokens": tokens}, prompt=len(tokens), count=6, **given)
    read = list(tokens)
    for part in parts:
        choice = part["choice"]
        with torch.no_grad():
            logits = python.model(torch.tensor([read]))[0, -1].float()
        shares = logits.softmax(-1)
        assert choice["share"] == pytest.approx(float(shares[choice["token"]]), rel=1e-3)
        assert choice["entropy"] == pytest.approx(float(-(shares * shares.log2()).sum()), abs=1e-3)
        assert choice["rank"] == int((logits > logits[choice["token"]]).sum()) + 1 <= 20
        assert choice["left"] == 20
        assert [each["token"] for each in choice["top"]] == logits.topk(5).indices.tolist()
        kept = (logits / 1.5).where(logits >= logits.topk(20).values[-1], -torch.inf).softmax(-1)
        assert choice["chance"] == pytest.approx(float(kept[choice["token"]]), rel=1e-3)
        assert choice["cache"]["length"] == len(read)
        read.append(choice["token"])
    assert len(arrays["apart"]) == 6


def test_the_cache_is_the_real_one() -> None:
    of = opened("tiny-gemma")
    windows = of.model.stacks["decoder"].windows
    tokens = ids(20, of.config.vocab_size)
    facts, _, parts = heard(of, "write", look={"tokens": tokens}, prompt=20, count=40, most=40)
    assert facts["kind"] == "ring"
    last = parts[-1]["choice"]["cache"]
    slots = dict(zip(windows, last["slots"], strict=True))
    ring = min(slots.values())
    assert ring < facts["slots"] == slots[None] == 60
    assert last["length"] == 59
    assert sorted(last["held"][str(ring)]) == list(range(59 - ring, 59))
    assert last["held"].keys() == {str(ring)}
    cache = of.model.new_cache(1, 60)
    assert sum(last["bytes"]) < sum(each.numel() * 4 for layer in cache.layers for each in (layer.k, layer.v))
    per = [(layer.k[0, 0].numel() + layer.v[0, 0].numel()) * 4 for layer in cache.layers]
    assert last["bytes"] == [each * count for each, count in zip(per, last["filled"], strict=True)]
    assert last["filled"] == [min(59, room) for room in last["slots"]]


def test_slots_are_where_the_cache_says() -> None:
    model = ct.build("tiny-gemma", seed=0)
    window = next(each for each in model.stacks["decoder"].windows if each is not None)
    cache = model.new_cache(1, 64, chunk=4)
    ring = window + 3
    for _ in range(8):
        _, steps = cache.place(4, None)
        model(torch.randint(100, (1, 4)), cache=cache)
        assert positions(cache, ring) == steps[ring].keys.position[0, : int(cache.length)].tolist()[:ring]


def test_an_encoder_decoder_writes_from_its_source() -> None:
    of = opened("tiny-t5")
    source = of.words.source_ids("a text")
    start = of.words.ids("")
    facts, _, parts = heard(of, "write", look={"tokens": start, "source": source}, prompt=1, count=8, most=8, seed=1)
    read = list(start)
    for part in parts:
        with torch.no_grad():
            assert part["choice"]["token"] == int(
                of.model(torch.tensor([source]), torch.tensor([read]))[0, -1].argmax()
            )
        read.append(part["choice"]["token"])
    assert len(read) == 9
    assert facts["check"]["largest"] <= 1e-4
    assert parts[0]["choice"]["cache"]["source"] > 0


def test_edits_are_part_of_what_writes(python: Inspector) -> None:
    tokens, edits = python.words.ids("def f("), {"blocks.0": "skip"}
    given = {"look": {"tokens": tokens, "edits": edits}, "prompt": len(tokens), "count": 4, "most": 4}
    facts, _, parts = heard(python, "write", **given)
    with ct.edit(python.model, edits), torch.no_grad():
        assert parts[0]["choice"]["token"] == int(python.model(torch.tensor([tokens]))[0, -1].argmax())
    assert facts["check"]["largest"] <= 1e-4


def test_encoders_fill_masks() -> None:
    of = opened("tiny-bert")
    with pytest.raises(InputError, match="does not write"):
        asked(of, "write", look={"tokens": [1]}, prompt=1)
    assert asked(of, "fill", text="a")[0] == {"mask": None, "able": False, "masks": []}


def test_masks_are_filled_as_the_library_does(tmp_path: Path) -> None:
    bert(tmp_path)
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer is not None
    config = {**ct.config("tiny-bert").model_dump(mode="json"), "vocab_size": tokenizer.vocab_size}
    model = ct.build(config, seed=0)
    of = Inspector(model, Words(tokenizer.vocab_size, tokenizer))
    text = "The [MASK] was without [MASK]."
    facts, _ = asked(of, "fill", text=text)
    told = fill_mask(model, tokenizer, [text])[0]
    assert [[each["token"] for each in one] for one in facts["masks"]] == [[each.id for each in one] for one in told]
    assert facts["masks"][1][0]["share"] == pytest.approx(told[1][0].probability)
    assert asked(of, "fill", text="no")[0] == {"mask": "[MASK]", "able": True, "masks": []}


def test_what_cannot_be_written(python: Inspector) -> None:
    with pytest.raises(InputError, match="there are 2 tokens"):
        asked(python, "write", look={"tokens": [1, 2]}, prompt=3)
    with pytest.raises(InputError, match="no masks"):
        asked(python, "fill", text="x")
    with pytest.raises(InputError):
        asked(python, "write", look={"tokens": [1] * 2000}, prompt=2000)
