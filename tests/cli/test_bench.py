"""`cutaway bench decode` and `prefill`: figures that follow from each other, and a peer that takes turns."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.cli_runner import CliRunner

import cutaway as ct
from cutaway.bench import throughput
from cutaway.bench.hardware import device_name
from cutaway.bench.throughput import (
    NUM_ROUNDS,
    WARMUP_STEPS,
    ThroughputResult,
    Timing,
    get_copy_bandwidth,
    measure_throughput,
)
from cutaway.generate import Engine
from cutaway.size.measured_hardware import load_measured_hardware, measured_hardware_path

pytestmark = pytest.mark.unchecked


@pytest.fixture
def run(run_cli: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """The verb with these arguments on the CPU."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    return lambda *arguments, **how: run_cli("bench", *arguments, "--device", "cpu", **how)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's limits need not be measured anew for each test."""
    monkeypatch.setattr(throughput, "measure_copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(throughput, "measure_matmul_flops", lambda device, dtype: 1e11)


def test_figures_of_decoding_follow_from_each_other(run: CliRunner) -> None:
    told = json.loads(run("decode", "tiny-llama", "--batch-size", 2, "--context", 32, "--num-steps", 16, "--json"))
    size = ct.size("tiny-llama", dtype="fp32", batch_size=2, context=32 + 8)
    assert told["min_bytes"] == size.decode_workload(2).min_bytes
    assert (told["num_parameters"], told["batch_size"], told["context"], told["dtype"]) == (
        size.num_parameters,
        2,
        32,
        "fp32",
    )
    for side in (told["cutaway"], told["baseline"]):
        assert 0 < side["lower_quartile"] <= side["median_seconds"] <= side["upper_quartile"]
        assert side["tokens_per_second"] == pytest.approx(2 / side["median_seconds"])
        assert side["fraction_of_limit"] == pytest.approx(told["min_bytes"] / 1e10 / side["median_seconds"])
    assert told["speedup"]["lower_quartile"] <= told["speedup"]["median"] <= told["speedup"]["upper_quartile"]
    assert told["notes"] == []


def test_narrow_weights_are_ours_alone(run: CliRunner) -> None:
    """The peer reads its weights as they are stored, and is held against that."""
    told = json.loads(run("decode", "tiny-llama", "--context", 32, "--num-steps", 8, "--weight-bits", 8, "--json"))
    ours, theirs = (
        ct.size("tiny-llama", dtype=dtype, context=36).decode_workload(1).min_bytes for dtype in ("int8", "fp32")
    )
    assert told["min_bytes"] == ours < theirs
    assert told["baseline"]["fraction_of_limit"] == pytest.approx(theirs / 1e10 / told["baseline"]["median_seconds"])


def test_figures_of_reading_follow_from_each_other(run: CliRunner) -> None:
    told = json.loads(run("prefill", "tiny-llama", "--context", 48, "--dtype", "bfloat16", "--no-baseline", "--json"))
    size = ct.size("tiny-llama", dtype="bf16", context=48)
    assert told["flops"] == size.prefill_flops.total_visible
    assert told["cutaway"]["tokens_per_second"] == pytest.approx(48 / told["cutaway"]["median_seconds"])
    assert told["cutaway"]["fraction_of_limit"] == pytest.approx(
        told["flops"] / 1e11 / told["cutaway"]["median_seconds"]
    )
    assert told["baseline"] is told["speedup"] is None


def test_people_see_both_sides(run: CliRunner) -> None:
    shown = run("decode", "tiny-gpt", "--num-steps", 8)
    assert "cutaway" in shown
    assert "transformers" in shown
    assert "times as fast" in shown
    assert "bare copy" in shown
    assert "bare product" in run("prefill", "tiny-gpt", "--no-baseline")


def test_a_checkpoint_is_measured_with_its_own_weights(run: CliRunner, tmp_path: Path) -> None:
    source = ct.save(ct.build("tiny-llama", seed=1), tmp_path / "model")
    told = json.loads(run("decode", source, "--num-steps", 8, "--json"))
    assert told["source"] == str(source)
    assert told["baseline"] is not None


@pytest.mark.parametrize("work", ["decode", "prefill"])
def test_every_text_takes_every_step(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """Prompts of a batch are read in pieces; the steps that count are of all of them."""
    batch, stepped = 3, []

    class Watched(Engine):
        def step(self) -> bool:
            more = super().step()
            stepped.append(self.num_decoding)
            return more

    monkeypatch.setattr(throughput, "Engine", Watched)
    found = measure_throughput(
        ct.build("tiny-llama", seed=0), work, batch_size=batch, context=64, num_steps=2 * NUM_ROUNDS
    )
    assert len(found.cutaway.seconds) == NUM_ROUNDS
    if work == "decode":
        assert stepped[-(WARMUP_STEPS + 2 * NUM_ROUNDS) :] == [batch] * (WARMUP_STEPS + 2 * NUM_ROUNDS)


def test_a_ratio_is_of_turns_not_of_sums() -> None:
    sides = Timing([1.0, 2.0, 1.0], 4, 0.5), Timing([2.0, 4.0, 3.0], 4, 0.5)
    told: dict[str, Any] = {
        "phase": "decode", "device": "", "dtype": "fp32", "weight_bits": None, "batch_size": 4, "context": 8,
    }  # fmt: skip
    found = ThroughputResult(
        **told, num_parameters=1, min_bytes=1, flops=1, hardware_limit=1.0, cutaway=sides[0], baseline=sides[1]
    )
    assert median(found.speedups) == 2
    assert found.to_dict()["speedup"]["upper_quartile"] == 2.5
    assert (sides[0].tokens_per_second, sides[0].fraction_of_limit) == (4, 0.5)


def test_without_a_peer_it_is_said_why(run: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ct.config("tiny-llama").model_dump()
    data["decoder"]["block"][0]["attention"]["position"] = {"kind": "alibi"}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    [note] = json.loads(run("decode", tmp_path / "mine.json", "--num-steps", 8, "--json"))["notes"]
    assert note.startswith("without a baseline: no published family can describe this model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    shown = run("decode", "tiny-llama", "--num-steps", 8)
    assert "without a baseline: transformers is not installed" in " ".join(shown.split())
    assert "not installed" in run("decode", "tiny-llama", "--num-steps", 8, "--baseline", code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode"], "no SOURCE is given"),
        (["decode", "tiny-bert"], "only decoders"),
        (["prefill", "tiny-t5"], "only decoders"),
        (["decode", "nowhere"], "does not exist"),
        (["decode", "tiny-gpt", "--context", "1000"], "learned 64 positions"),
        (["decode", "tiny-gpt", "--batch-size", "0"], "--batch-size"),
        (["decode", "tiny-gpt", "--model", "gpt2"], "--model is for the machine's own"),
        (["--num-steps", "3"], "--num-steps is for one model"),
        (["--compile"], "--compile is for one model"),
        (["prefill", "tiny-gpt", "--num-steps", "3"], "--num-steps is about steps"),
        (["prefill", "tiny-gpt", "--weight-bits", "8"], "--weight-bits is about steps"),
        (["dekode", "tiny-gpt"], "dekode"),
    ],
)
def test_mistakes_get_one_sentence(run: CliRunner, arguments: list[str], says: str) -> None:
    error = run(*arguments, code=2)
    assert says in error
    assert "Traceback" not in error


def test_without_a_word_the_machine_is_measured(run: CliRunner) -> None:
    told = json.loads(run("--model", "tiny-llama", "--json"))
    assert told["path"] == str(measured_hardware_path())
    kept = load_measured_hardware()
    assert kept is not None
    get_copy_bandwidth.cache_clear()
    assert kept.device == device_name(torch.device("cpu"))
    assert get_copy_bandwidth(torch.device("cpu")) == kept.bandwidth
    get_copy_bandwidth.cache_clear()
