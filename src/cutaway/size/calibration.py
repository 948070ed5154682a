"""What `cutaway bench` measured on this machine, kept so that sizes can be given for it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from cutaway.errors import InputError
from cutaway.size.hardware import Hardware
from cutaway.size.roofline import EFFICIENCY, Efficiency

HERE = "here"
"""The name by which this machine is asked for."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Limits and shares of one machine. Rates are a second's; shares are of the bound that those limits give."""

    device: str
    kind: str
    hardware: str | None
    """Its name in the hardware table, if it is there."""
    memory: int
    bandwidth: float
    flops: dict[str, float]
    shares: dict[str, float]
    model: str
    dtype: str
    """What the shares were measured with, and in."""
    date: str


def where() -> Path:
    """In the user's cache, or where CUTAWAY_CACHE points."""
    given = os.environ.get("CUTAWAY_CACHE")
    cache = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cutaway"
    try:
        return cache.expanduser() / "bench.json"
    except RuntimeError:  # a user without a home, as in many containers, has measured nothing
        return cache / "bench.json"


def record(measured: Calibration) -> Path:
    """Keep a measurement; the file appears whole or not at all."""
    path = where()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def recorded() -> Calibration | None:
    """What was measured, if it was."""
    try:
        data = json.loads(where().read_text(encoding="utf-8"))
        measured = Calibration(**data)
        rates = [measured.bandwidth, measured.memory, *measured.flops.values(), *measured.shares.values()]
        sound = all(isinstance(rate, int | float) and 1e-9 < rate < 1e30 for rate in rates)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise InputError(f"'{where()}' is damaged; run `cutaway bench` again, or delete it")
    return measured


def here() -> Hardware:
    """This machine, as measured."""
    measured = recorded()
    if measured is None:
        raise InputError("this machine has not been measured yet; run `cutaway bench`, or name a known device")
    return Hardware(
        name=HERE,
        title=f"this machine ({measured.device})",
        kind=measured.kind,
        bandwidth=measured.bandwidth,
        flops=measured.flops,
        memory=measured.memory,
        source="measured by cutaway bench",
        checked=measured.date,
    )


def efficiency_of(work: str, device: Hardware, dtype: str) -> Efficiency:
    """The range for a kind of work: as measured, within a third, on the device and in the dtype that was; else in
    general."""
    try:
        measured = recorded()
    except InputError:  # a damaged file; asking for this machine by name has said so
        measured = None
    if measured is None or device.name not in (HERE, measured.hardware):
        return EFFICIENCY[work]
    if dtype != measured.dtype or work not in measured.shares:
        return EFFICIENCY[work]
    share = measured.shares[work]
    if device.name != HERE:  # shares are of the machine's own limits, and this bound is of the published ones
        limits = {"decode": measured.bandwidth / device.bandwidth}
        share *= limits.get(work, measured.flops.get(dtype, device.rate(dtype)) / device.rate(dtype))
    said = f"measured on this machine with {measured.model} in {dtype}, {measured.date}, give or take a third"
    return Efficiency(min(0.99, share * 4 / 3), share * 2 / 3, said)
