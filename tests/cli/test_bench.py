"""`cutaway bench decode`, `prefill` and machine measurement."""

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
    """Run the verb on the CPU."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    return lambda *arguments, **options: run_cli("bench", *arguments, "--device", "cpu", **options)


@pytest.fixture(autouse=True)
def fixed_hardware_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the measured hardware limits, to save time."""
    monkeypatch.setattr(throughput, "measure_copy_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(throughput, "measure_matmul_flops", lambda device, dtype: 1e11)


def test_decode_measurements_are_consistent(run: CliRunner) -> None:
    data = json.loads(run("decode", "tiny-llama", "--batch-size", 2, "--context", 32, "--num-steps", 16, "--json"))
    size = ct.size("tiny-llama", dtype="fp32", batch_size=2, context=32 + 8)
    assert data["min_bytes"] == size.decode_workload(2).min_bytes
    assert (data["num_parameters"], data["batch_size"], data["context"], data["dtype"]) == (
        size.num_parameters,
        2,
        32,
        "fp32",
    )
    for result in (data["cutaway"], data["baseline"]):
        assert 0 < result["lower_quartile"] <= result["median_seconds"] <= result["upper_quartile"]
        assert result["tokens_per_second"] == pytest.approx(2 / result["median_seconds"])
        assert result["fraction_of_limit"] == pytest.approx(data["min_bytes"] / 1e10 / result["median_seconds"])
    assert data["speedup"]["lower_quartile"] <= data["speedup"]["median"] <= data["speedup"]["upper_quartile"]
    assert data["notes"] == []


def test_weight_bits_apply_to_cutaway_only(run: CliRunner) -> None:
    """The baseline's limit is computed with unquantized weights."""
    data = json.loads(run("decode", "tiny-llama", "--context", 32, "--num-steps", 8, "--weight-bits", 8, "--json"))
    quantized_bytes, full_bytes = (
        ct.size("tiny-llama", dtype=dtype, context=36).decode_workload(1).min_bytes for dtype in ("int8", "fp32")
    )
    assert data["min_bytes"] == quantized_bytes < full_bytes
    assert data["baseline"]["fraction_of_limit"] == pytest.approx(
        full_bytes / 1e10 / data["baseline"]["median_seconds"]
    )


def test_prefill_measurements_are_consistent(run: CliRunner) -> None:
    data = json.loads(run("prefill", "tiny-llama", "--context", 48, "--dtype", "bfloat16", "--no-baseline", "--json"))
    size = ct.size("tiny-llama", dtype="bf16", context=48)
    assert data["flops"] == size.prefill_flops.total_visible
    assert data["cutaway"]["tokens_per_second"] == pytest.approx(48 / data["cutaway"]["median_seconds"])
    assert data["cutaway"]["fraction_of_limit"] == pytest.approx(
        data["flops"] / 1e11 / data["cutaway"]["median_seconds"]
    )
    assert data["baseline"] is data["speedup"] is None


def test_table_shows_cutaway_and_transformers(run: CliRunner) -> None:
    output = run("decode", "tiny-gpt", "--num-steps", 8)
    assert "cutaway" in output
    assert "transformers" in output
    assert "times as fast" in output
    assert "a copy on this device" in output
    assert "a matrix product on this device" in run("prefill", "tiny-gpt", "--no-baseline")


def test_checkpoint_has_a_baseline(run: CliRunner, tmp_path: Path) -> None:
    source = ct.save(ct.build("tiny-llama", seed=1), tmp_path / "model")
    data = json.loads(run("decode", source, "--num-steps", 8, "--json"))
    assert data["source"] == str(source)
    assert data["baseline"] is not None


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_all_sequences_decode_in_every_measured_step(monkeypatch: pytest.MonkeyPatch, phase: Any) -> None:
    """Prompts are prefilled in chunks; the measured steps decode the whole batch."""
    batch_size, num_decoding = 3, []

    class RecordingEngine(Engine):
        def step(self) -> bool:
            more = super().step()
            num_decoding.append(self.num_decoding)
            return more

    monkeypatch.setattr(throughput, "Engine", RecordingEngine)
    result = measure_throughput(
        ct.build("tiny-llama", seed=0), phase, batch_size=batch_size, context=64, num_steps=2 * NUM_ROUNDS
    )
    assert len(result.cutaway.seconds) == NUM_ROUNDS
    if phase == "decode":
        assert num_decoding[-(WARMUP_STEPS + 2 * NUM_ROUNDS) :] == [batch_size] * (WARMUP_STEPS + 2 * NUM_ROUNDS)


def test_speedup_is_the_median_over_paired_rounds() -> None:
    timings = Timing([1.0, 2.0, 1.0], 4, 0.5), Timing([2.0, 4.0, 3.0], 4, 0.5)
    fields: dict[str, Any] = {
        "phase": "decode", "device": "", "dtype": "fp32", "weight_bits": None, "batch_size": 4, "context": 8,
    }  # fmt: skip
    result = ThroughputResult(
        **fields, num_parameters=1, min_bytes=1, flops=1, hardware_limit=1.0, cutaway=timings[0], baseline=timings[1]
    )
    assert median(result.speedups) == 2
    assert result.to_dict()["speedup"]["upper_quartile"] == 2.5
    assert (timings[0].tokens_per_second, timings[0].fraction_of_limit) == (4, 0.5)


def test_missing_baseline_has_a_note(run: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ct.config("tiny-llama").model_dump()
    data["decoder"]["block"][0]["attention"]["position"] = {"kind": "alibi"}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    [note] = json.loads(run("decode", tmp_path / "mine.json", "--num-steps", 8, "--json"))["notes"]
    assert note.startswith("no baseline: no family can represent this model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    output = run("decode", "tiny-llama", "--num-steps", 8)
    assert "no baseline: transformers is not installed" in " ".join(output.split())
    assert "not installed" in run("decode", "tiny-llama", "--num-steps", 8, "--baseline", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode"], "SOURCE is missing"),
        (["decode", "tiny-bert"], "not decoder-only"),
        (["prefill", "tiny-t5"], "not decoder-only"),
        (["decode", "nowhere"], "no preset or file named 'nowhere'"),
        (["decode", "tiny-gpt", "--context", "1000"], "has 64 positions"),
        (["decode", "tiny-gpt", "--batch-size", "0"], "--batch-size"),
        (["decode", "tiny-gpt", "--model", "gpt2"], "--model is for measuring the machine"),
        (["--num-steps", "3"], "--num-steps applies to one model"),
        (["--compile"], "--compile applies to one model"),
        (["prefill", "tiny-gpt", "--num-steps", "3"], "--num-steps applies to decode"),
        (["prefill", "tiny-gpt", "--weight-bits", "8"], "--weight-bits applies to decode"),
        (["dekode", "tiny-gpt"], "dekode"),
    ],
)
def test_errors_have_one_message(run: CliRunner, arguments: list[str], message: str) -> None:
    error = run(*arguments, code=2)
    assert message in error
    assert "Traceback" not in error


@pytest.mark.nightly
def test_machine_measurement_is_saved(run: CliRunner) -> None:
    data = json.loads(run("--model", "tiny-llama", "--json"))
    assert data["path"] == str(measured_hardware_path())
    saved = load_measured_hardware()
    assert saved is not None
    get_copy_bandwidth.cache_clear()
    assert saved.device == device_name(torch.device("cpu"))
    assert get_copy_bandwidth(torch.device("cpu")) == saved.bandwidth
    get_copy_bandwidth.cache_clear()
