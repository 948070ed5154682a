"""Measured hardware: measurement, the file it is stored in, and its use in size estimates."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import cutaway as ct
from cutaway.bench import NUM_STAGES, measure_hardware
from cutaway.errors import InputError
from cutaway.size.hardware import get_hardware
from cutaway.size.measured_hardware import (
    MeasuredHardware,
    expected_efficiency,
    load_measured_hardware,
    measured_hardware_path,
    save_measured_hardware,
)
from cutaway.size.roofline import DEFAULT_EFFICIENCY


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def example_hardware() -> MeasuredHardware:
    return MeasuredHardware(
        device="NVIDIA H200",
        kind="data-center",
        hardware_name="h200-sxm",
        memory=150 * 10**9,
        bandwidth=4.2e12,
        flops={"fp32": 5e13, "bf16": 7.6e14},
        efficiency={"prefill": 0.5, "decode": 0.3, "train": 0.45},
        model="llama-3.2-1b",
        dtype="bf16",
        date="2026-11-15",
    )


@pytest.mark.nightly
def test_measured_hardware_can_be_saved_and_used() -> None:
    stages: list[str] = []
    measured = measure_hardware("cpu", model="tiny-llama", progress=stages.append)
    assert len(stages) == NUM_STAGES
    assert all(0 < fraction <= 1 for fraction in measured.efficiency.values())
    save_measured_hardware(measured)
    assert load_measured_hardware() == measured
    size = ct.size("tiny-llama", hardware="local", dtype="fp32")
    assert size.decode_time is not None
    assert size.decode_time.bandwidth_seconds == pytest.approx(size.decode_workload(1).min_bytes / measured.bandwidth)
    assert "measured" in size.decode_time.efficiency.source
    assert size.fits


def test_missing_measurement_is_an_error() -> None:
    assert load_measured_hardware() is None
    with pytest.raises(InputError, match="cutaway bench"):
        ct.size("gpt2", hardware="local")


def test_measured_efficiency_is_used_for_the_same_device() -> None:
    before = expected_efficiency("decode", get_hardware("h200"), "bf16")
    save_measured_hardware(example_hardware())
    after = expected_efficiency("decode", get_hardware("h200"), "bf16")
    assert before == DEFAULT_EFFICIENCY["decode"]
    assert after.low < 0.3 * 4.2 / 4.8 < after.high
    assert expected_efficiency("decode", get_hardware("h100"), "bf16") == DEFAULT_EFFICIENCY["decode"]
    assert expected_efficiency("decode", get_hardware("h200"), "int4") == DEFAULT_EFFICIENCY["decode"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"device": 1}'])
def test_invalid_file_is_an_error_and_not_used(damage: str) -> None:
    save_measured_hardware(example_hardware())
    measured_hardware_path().write_text(damage)
    with pytest.raises(InputError, match="not a valid measurement"):
        ct.size("gpt2", hardware="local")
    assert expected_efficiency("decode", get_hardware("h200"), "bf16") == DEFAULT_EFFICIENCY["decode"]


def test_negative_bandwidth_is_invalid() -> None:
    path = save_measured_hardware(example_hardware())
    path.write_text(json.dumps(asdict(example_hardware()) | {"bandwidth": -1}))
    with pytest.raises(InputError, match="not a valid measurement"):
        ct.size("gpt2", hardware="local")


@pytest.mark.parametrize(
    ("options", "message"), [({"model": "t5-small"}, "decoder"), ({"device": "meta"}, "cpu or cuda")]
)
def test_invalid_arguments_raise_before_measuring(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_hardware(progress=lambda what: pytest.fail(f"{what} was measured"), **options)


def test_missing_home_directory_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUTAWAY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def raise_no_home(self: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "expanduser", raise_no_home)
    assert ct.size("gpt2", hardware="h100").decode_time is not None
