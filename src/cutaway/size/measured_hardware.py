"""What `cutaway bench` measured on this machine, kept so that sizes can be given for it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cutaway.errors import InputError
from cutaway.size.hardware import Hardware
from cutaway.size.roofline import DEFAULT_EFFICIENCY, EfficiencyRange

LOCAL_HARDWARE = "local"
"""The name by which this machine is asked for."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """Limits and shares of one machine. Rates are a second's; shares are of the bound that those limits give."""

    device: str
    kind: str
    hardware_name: str | None
    """Its name in the hardware table, if it is there."""
    memory: int
    bandwidth: float
    flops: dict[str, float]
    efficiency: dict[str, float]
    model: str
    dtype: str
    """What the shares were measured with, and in."""
    date: str


def user_cache_dir() -> Path:
    """Where measurements of this machine are kept: the user's cache, or where CUTAWAY_CACHE points."""
    given = os.environ.get("CUTAWAY_CACHE")
    cache = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cutaway"
    try:
        return cache.expanduser()
    except RuntimeError:  # a user without a home, as in many containers, has measured nothing
        return cache


def measured_hardware_path() -> Path:
    return user_cache_dir() / "measured_hardware.json"


def save_measured_hardware(measured: MeasuredHardware) -> Path:
    """Keep a measurement; the file appears whole or not at all."""
    path = measured_hardware_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def load_measured_hardware() -> MeasuredHardware | None:
    """What was measured, if it was."""
    try:
        data = json.loads(measured_hardware_path().read_text(encoding="utf-8"))
        measured = MeasuredHardware(**data)
        rates = [measured.bandwidth, measured.memory, *measured.flops.values(), *measured.efficiency.values()]
        sound = all(isinstance(rate, int | float) and 1e-9 < rate < 1e30 for rate in rates)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise InputError(f"'{measured_hardware_path()}' is damaged; run `cutaway bench` again, or delete it")
    return measured


def local_hardware() -> Hardware:
    """This machine, as measured."""
    measured = load_measured_hardware()
    if measured is None:
        raise InputError("this machine has not been measured yet; run `cutaway bench`, or name a known device")
    return Hardware(
        name=LOCAL_HARDWARE,
        title=f"this machine ({measured.device})",
        kind=measured.kind,
        bandwidth=measured.bandwidth,
        flops=measured.flops,
        memory=measured.memory,
        source="measured by cutaway bench",
        verified_date=measured.date,
    )


def expected_efficiency(workload: str, hardware: Hardware, dtype: str) -> EfficiencyRange:
    """The range for a kind of work: as measured, within a third, on the device and in the dtype that was; else in
    general."""
    try:
        measured = load_measured_hardware()
    except InputError:  # a damaged file; asking for this machine by name has said so
        measured = None
    if measured is None or hardware.name not in (LOCAL_HARDWARE, measured.hardware_name):
        return DEFAULT_EFFICIENCY[workload]
    if dtype != measured.dtype or workload not in measured.efficiency:
        return DEFAULT_EFFICIENCY[workload]
    share = measured.efficiency[workload]
    if hardware.name != LOCAL_HARDWARE:  # measured against the machine's own limits; this bound has published ones
        limits = {"decode": measured.bandwidth / hardware.bandwidth}
        share *= limits.get(
            workload, measured.flops.get(dtype, hardware.peak_flops(dtype)) / hardware.peak_flops(dtype)
        )
    said = f"measured on this machine with {measured.model} in {dtype}, {measured.date}, give or take a third"
    return EfficiencyRange(min(0.99, share * 4 / 3), share * 2 / 3, said)
