"""`cutaway bench decode` and `prefill`: figures that follow from each other, and a peer that takes turns."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from verbs import Run

import cutaway as ct
from cutaway.bench import decode
from cutaway.bench.decode import ROUNDS, WARM, Measured, Side, copy_bandwidth, measure_speed
from cutaway.bench.machine import device_name
from cutaway.generate import Engine
from cutaway.size.calibration import recorded, where

pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(verb: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The verb with these arguments on the CPU."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    return lambda *arguments, **how: verb("bench", *arguments, "--device", "cpu", **how)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits need not be measured anew for each test."""
    monkeypatch.setattr(decode, "copy_rate", lambda device: 1e10)
    monkeypatch.setattr(decode, "product_rate", lambda device, dtype: 1e11)


def test_figures_of_decoding_follow_from_each_other(run: Run) -> None:
    told = json.loads(run("decode", "tiny-llama", "--batch", 2, "--context", 32, "--steps", 16, "--json"))
    size = ct.size("tiny-llama", dtype="fp32", batch=2, context=32 + 8)
    assert told["bytes"] == size.decode_work(2).bytes
    assert (told["parameters"], told["batch"], told["context"], told["dtype"]) == (size.params, 2, 32, "fp32")
    for side in (told["ours"], told["peer"]):
        assert 0 < side["lower_quartile"] <= side["seconds"] <= side["upper_quartile"]
        assert side["tokens_per_second"] == pytest.approx(2 / side["seconds"])
        assert side["share_of_limit"] == pytest.approx(told["bytes"] / 1e10 / side["seconds"])
    assert told["ratio"]["lower_quartile"] <= told["ratio"]["median"] <= told["ratio"]["upper_quartile"]
    assert told["notes"] == []


def test_narrow_weights_are_ours_alone(run: Run) -> None:
    """The peer reads its weights as they are stored, and is held against that."""
    told = json.loads(run("decode", "tiny-llama", "--context", 32, "--steps", 8, "--bits", 8, "--json"))
    ours, theirs = (ct.size("tiny-llama", dtype=dtype, context=36).decode_work(1).bytes for dtype in ("int8", "fp32"))
    assert told["bytes"] == ours < theirs
    assert told["peer"]["share_of_limit"] == pytest.approx(theirs / 1e10 / told["peer"]["seconds"])


def test_figures_of_reading_follow_from_each_other(run: Run) -> None:
    told = json.loads(run("prefill", "tiny-llama", "--context", 48, "--dtype", "bf16", "--no-peer", "--json"))
    size = ct.size("tiny-llama", dtype="bf16", context=48)
    assert told["flops"] == size.prompt_flops.total_seen
    assert told["ours"]["tokens_per_second"] == pytest.approx(48 / told["ours"]["seconds"])
    assert told["ours"]["share_of_limit"] == pytest.approx(told["flops"] / 1e11 / told["ours"]["seconds"])
    assert told["peer"] is told["ratio"] is None


def test_people_see_both_sides(run: Run) -> None:
    shown = run("decode", "tiny-gpt", "--steps", 8)
    assert "cutaway" in shown
    assert "transformers" in shown
    assert "times as fast" in shown
    assert "bare copy" in shown
    assert "bare product" in run("prefill", "tiny-gpt", "--no-peer")


def test_a_checkpoint_is_measured_with_its_own_weights(run: Run, tmp_path: Path) -> None:
    source = ct.save(ct.build("tiny-llama", seed=1), tmp_path / "model")
    told = json.loads(run("decode", source, "--steps", 8, "--json"))
    assert told["source"] == str(source)
    assert told["peer"] is not None


@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_every_text_takes_every_step(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Prompts of a batch are read in pieces; the steps that count are of all of them."""
    batch, stepped = 3, []

    class Watched(Engine):
        def turn(self) -> bool:
            more = super().turn()
            stepped.append(self.stepping)
            return more

    monkeypatch.setattr(decode, "Engine", Watched)
    found = measure_speed(ct.build("tiny-llama", seed=0), work, batch=batch, context=64, steps=2 * ROUNDS)
    assert len(found.ours.seconds) == ROUNDS
    if work == "decode":
        assert stepped[-(WARM + 2 * ROUNDS) :] == [batch] * (WARM + 2 * ROUNDS)


def test_a_ratio_is_of_turns_not_of_sums() -> None:
    sides = Side([1.0, 2.0, 1.0], 4, 0.5), Side([2.0, 4.0, 3.0], 4, 0.5)
    told: dict[str, Any] = {"work": "decode", "device": "", "dtype": "fp32", "bits": None, "batch": 4, "context": 8}
    found = Measured(**told, parameters=1, bytes=1, flops=1, limit=1.0, ours=sides[0], peer=sides[1])
    assert median(found.ratios) == 2
    assert found.to_dict()["ratio"]["upper_quartile"] == 2.5
    assert (sides[0].rate, sides[0].share) == (4, 0.5)


def test_without_a_peer_it_is_said_why(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ct.config("tiny-llama").model_dump()
    data["decoder"]["block"][0]["attention"]["position"] = {"kind": "alibi"}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    [note] = json.loads(run("decode", tmp_path / "mine.json", "--steps", 8, "--json"))["notes"]
    assert note.startswith("without a peer: no published family can describe this model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = run("decode", "tiny-llama", "--steps", 8)
    assert "without a peer: transformers is not installed" in " ".join(shown.split())
    assert "not installed" in run("decode", "tiny-llama", "--steps", 8, "--peer", code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode"], "no SOURCE is given"),
        (["decode", "tiny-bert"], "only decoders"),
        (["prefill", "tiny-t5"], "only decoders"),
        (["decode", "nowhere"], "does not exist"),
        (["decode", "tiny-gpt", "--context", "1000"], "learned 64 positions"),
        (["decode", "tiny-gpt", "--batch", "0"], "--batch"),
        (["decode", "tiny-gpt", "--model", "gpt2"], "--model is for the machine's own"),
        (["--steps", "3"], "--steps is for one model"),
        (["--compile"], "--compile is for one model"),
        (["prefill", "tiny-gpt", "--steps", "3"], "--steps is about steps"),
        (["prefill", "tiny-gpt", "--bits", "8"], "--bits is about steps"),
        (["dekode", "tiny-gpt"], "dekode"),
    ],
)
def test_mistakes_get_one_sentence(run: Run, arguments: list[str], says: str) -> None:
    error = run(*arguments, code=2)
    assert says in error
    assert "Traceback" not in error


def test_without_a_word_the_machine_is_measured(run: Run) -> None:
    told = json.loads(run("--model", "tiny-llama", "--json"))
    assert told["kept"] == str(where())
    kept = recorded()
    assert kept is not None
    copy_bandwidth.cache_clear()
    assert kept.device == device_name(torch.device("cpu"))
    assert copy_bandwidth(torch.device("cpu")) == kept.bandwidth
    copy_bandwidth.cache_clear()
