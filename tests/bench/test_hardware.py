"""What a machine is measured to be is kept whole, and is what sizes are then given for."""

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
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))


def known() -> MeasuredHardware:
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


def test_a_machine_can_be_measured_and_asked_for() -> None:
    stages: list[str] = []
    measured = measure_hardware("cpu", model="tiny-llama", progress=stages.append)
    assert len(stages) == NUM_STAGES
    assert all(0 < share <= 1 for share in measured.efficiency.values())
    save_measured_hardware(measured)
    assert load_measured_hardware() == measured
    size = ct.size("tiny-llama", hardware="local", dtype="fp32")
    assert size.decode_time is not None
    assert size.decode_time.bandwidth_seconds == pytest.approx(size.decode_workload(1).min_bytes / measured.bandwidth)
    assert "measured" in size.decode_time.efficiency.source
    assert size.fits


def test_unmeasured_is_said() -> None:
    assert load_measured_hardware() is None
    with pytest.raises(InputError, match="cutaway bench"):
        ct.size("gpt2", hardware="local")


def test_a_known_device_that_was_measured_is_expected_to_do_the_same_again() -> None:
    before = expected_efficiency("decode", get_hardware("h200"), "bf16")
    save_measured_hardware(known())
    after = expected_efficiency("decode", get_hardware("h200"), "bf16")
    assert before == DEFAULT_EFFICIENCY["decode"]
    assert after.low < 0.3 * 4.2 / 4.8 < after.high
    assert expected_efficiency("decode", get_hardware("h100"), "bf16") == DEFAULT_EFFICIENCY["decode"]
    assert expected_efficiency("decode", get_hardware("h200"), "int4") == DEFAULT_EFFICIENCY["decode"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"device": 1}'])
def test_a_damaged_file_is_said_and_not_trusted(damage: str) -> None:
    save_measured_hardware(known())
    measured_hardware_path().write_text(damage)
    with pytest.raises(InputError, match="damaged"):
        ct.size("gpt2", hardware="local")
    assert expected_efficiency("decode", get_hardware("h200"), "bf16") == DEFAULT_EFFICIENCY["decode"]


def test_rates_that_no_machine_has_are_damage() -> None:
    path = save_measured_hardware(known())
    path.write_text(json.dumps(asdict(known()) | {"bandwidth": -1}))
    with pytest.raises(InputError, match="damaged"):
        ct.size("gpt2", hardware="local")


@pytest.mark.parametrize(("how", "says"), [({"model": "t5-small"}, "decoder"), ({"device": "meta"}, "cpu or cuda")])
def test_what_cannot_be_measured_is_said_before_measuring(how: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        measure_hardware(progress=lambda what: pytest.fail(f"{what} was measured"), **how)


def test_a_user_without_a_home_has_measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUTAWAY_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert ct.size("gpt2", hardware="h100").decode_time is not None
