"""Results of `cutaway bench` on this machine, stored on disk and used for `hardware="local"`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cutaway.errors import InputError
from cutaway.size.hardware import Hardware
from cutaway.size.roofline import DEFAULT_EFFICIENCY, EfficiencyRange
from cutaway.user_files import user_cache_dir, write_text_atomically

LOCAL_HARDWARE = "local"
"""Value of `hardware` that selects this machine."""


@dataclass(frozen=True, kw_only=True)
class MeasuredHardware:
    """Measured bandwidth and FLOPS of a machine, and the fraction of the roofline bound that each workload reached."""

    device: str
    kind: str
    hardware_name: str | None
    """Name of the device in the hardware table; None if the device is not in the table."""
    memory: int
    bandwidth: float
    flops: dict[str, float]
    efficiency: dict[str, float]
    model: str
    dtype: str
    """The model and the dtype with which the efficiency was measured."""
    date: str


def measured_hardware_path() -> Path:
    return user_cache_dir() / "measured_hardware.json"


def save_measured_hardware(measured: MeasuredHardware) -> Path:
    """Write a measurement to the user's cache directory and return the path of the file."""
    path = measured_hardware_path()
    write_text_atomically(path, json.dumps(asdict(measured), indent=1) + "\n")
    return path


def load_measured_hardware() -> MeasuredHardware | None:
    """Load the measurement of this machine, or None if `cutaway bench` has not stored one; raise if it is invalid."""
    try:
        measured = MeasuredHardware(**json.loads(measured_hardware_path().read_text(encoding="utf-8")))
        figures = [measured.bandwidth, measured.memory, *measured.flops.values(), *measured.efficiency.values()]
        if all(isinstance(figure, int | float) and 1e-9 < figure < 1e30 for figure in figures):
            return measured
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        pass
    path = measured_hardware_path()
    raise InputError(f"'{path}' is not a valid measurement; run `cutaway bench` again, or delete the file")


def local_hardware() -> Hardware:
    """Specification of this machine, as measured by `cutaway bench`; raise if it has not been measured."""
    measured = load_measured_hardware()
    if measured is None:
        raise InputError(
            "hardware is 'local', but this machine has not been measured; run `cutaway bench`, or pass a device name"
        )
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
    """Expected efficiency of a workload ('prefill', 'decode' or 'train'): the measured one ± 1/3, or the default range.

    The measurement is used only if it was made on `hardware` in `dtype`."""
    try:
        measured = load_measured_hardware()
    except InputError:  # an invalid file; hardware='local' raises the error
        measured = None
    if measured is None or hardware.name not in (LOCAL_HARDWARE, measured.hardware_name):
        return DEFAULT_EFFICIENCY[workload]
    if dtype != measured.dtype or workload not in measured.efficiency:
        return DEFAULT_EFFICIENCY[workload]
    fraction = measured.efficiency[workload]
    if hardware.name != LOCAL_HARDWARE:  # convert to a fraction of the published rates, not of the measured ones
        peak = hardware.peak_flops(dtype)
        flops_ratio = measured.flops.get(dtype, peak) / peak
        fraction *= measured.bandwidth / hardware.bandwidth if workload == "decode" else flops_ratio
    source = f"measured on this machine with {measured.model} in {dtype}, {measured.date}, ± 1/3"
    return EfficiencyRange(min(0.99, fraction * 4 / 3), fraction * 2 / 3, source)
