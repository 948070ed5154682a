"""Device specifications: published dense peak FLOPS, bandwidth and memory, read from `hardware.toml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path

from cutaway.errors import InputError

_MIN_FIGURE, _MAX_FIGURE = 1, 1e30
"""Accepted range of numbers of bytes and of rates per second. Within it every estimate is finite."""

HARDWARE_KINDS = ("data-center", "workstation", "consumer", "apple", "cpu")

_HALF_PRECISION = ("bf16", "fp16", "fp32")
COMPUTE_DTYPES = {
    "fp32": ("fp32", "bf16"),  # no fp32 rate is published for TPUs and Gaudi; it is at most the bf16 rate
    "tf32": ("tf32", "fp32", "bf16"),
    "bf16": _HALF_PRECISION,  # Volta and Turing have no bf16
    "fp16": ("fp16", "fp32", "bf16"),
    "mixed": _HALF_PRECISION,
    "fp8": ("fp8", *_HALF_PRECISION),
    "int8": _HALF_PRECISION,  # weights are dequantized before the matmul
    "int4": _HALF_PRECISION,
}
"""For each dtype, the dtypes whose peak rate may be used. The first one for which the device has a rate is used."""

_VENDOR_WORDS = {"nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "xeon", "platinum", "core"}
_VENDOR_WORDS |= {"apple", "google", "cloud", "aws", "gpu", "graphics", "r", "tm"}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Specification of one device. Rates are upper bounds; unpublished values are None or absent."""

    name: str
    title: str
    kind: str
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    flops: Mapping[str, float] = field(hash=False)
    """Dense FLOPS (operations per second) by dtype, with fp32 accumulation."""
    memory: float | None = None
    """Memory size in bytes; for shared or pluggable memory, the maximum size."""
    interconnect_bandwidth: float | None = None
    """Bytes per second in one direction, summed over all links."""
    tdp_watts: float | None = None
    year: int | None = None
    source: str
    verified_date: str
    note: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        figures = {"bandwidth": self.bandwidth, **{f"flops in {dtype}": rate for dtype, rate in self.flops.items()}}
        figures |= {} if self.memory is None else {"memory": self.memory}
        for label, value in figures.items():
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and _MIN_FIGURE <= value <= _MAX_FIGURE):
                raise InputError(f"{label} is {value!r}, which is not a valid figure; pass a number from 1 to 1e30")

    def compute_dtype(self, dtype: str) -> str:
        """The dtype whose peak rate applies to matmuls in `dtype`: bf16 for int8 weights, fp16 on a T4, and so on."""
        if dtype not in COMPUTE_DTYPES:
            raise InputError(f"dtype {dtype!r} has no peak rate; use one of {', '.join(COMPUTE_DTYPES)}")
        for known in COMPUTE_DTYPES[dtype]:
            if known in self.flops:
                return known
        problem = f"{self.title} has peak rates for {', '.join(self.flops)} only, and none applies to {dtype}"
        raise InputError(f"{problem}; use one of those dtypes, or pass the rate with --flops")

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOPS (operations per second) of matmuls in `dtype`."""
        return self.flops[self.compute_dtype(dtype)]


def get_hardware(name: str) -> Hardware:
    """Look up a device by name, title or alias; raise if there is none.

    Case, spaces, dashes and the vendor name are ignored."""
    key = _name_index().get(_normalize_name(name))
    if key is None:
        problem = f"unknown device {name!r}{_suggest_names(name)}"
        raise InputError(f"{problem}; use a name of --list-hardware, or pass --bandwidth and --flops")
    return _devices()[key]


def list_hardware() -> tuple[Hardware, ...]:
    """List all devices of hardware.toml, sorted by kind, year and name."""
    devices = _devices().values()
    return tuple(sorted(devices, key=lambda device: (HARDWARE_KINDS.index(device.kind), device.year or 0, device.name)))


def custom_hardware(
    *, bandwidth: float, flops: float, dtype: str | None = None, memory: float | None = None
) -> Hardware:
    """Build a device from its bandwidth (bytes per second), peak FLOPS and memory size (bytes).

    `flops` is the peak rate in `dtype`; without a dtype, in all dtypes."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise InputError(f"dtype {dtype!r} of flops is not known; use one of {', '.join(COMPUTE_DTYPES)}")
    dtypes = COMPUTE_DTYPES if dtype is None else (dtype,)
    return Hardware(
        name="custom",
        title="custom hardware",
        kind="custom",
        bandwidth=bandwidth,
        flops={COMPUTE_DTYPES[name][0]: flops for name in dtypes},
        memory=memory,
        source="set by the user",
        verified_date="not verified",
    )


def _normalize_name(name: str) -> str:
    """Reduce a device name to letters and digits without vendor names: "NVIDIA GeForce RTX-4090" → "rtx4090"."""
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in _VENDOR_WORDS)


@cache
def _devices() -> dict[str, Hardware]:
    """The devices of hardware.toml by name."""
    import tomllib  # slower to import than this module

    tables = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
    return {
        name: Hardware(name=name, aliases=tuple(fields.pop("aliases", ())), **fields) for name, fields in tables.items()
    }


@cache
def _name_index() -> dict[str, str]:
    """Map the normalized name, title and aliases of each device to its name."""
    names = {name: (name, device.title, *device.aliases) for name, device in _devices().items()}
    return {_normalize_name(alias): name for name, aliases in names.items() for alias in aliases}


def _suggest_names(name: str) -> str:
    """Return ' (did you mean …?)' with up to three device names similar to `name`, or an empty string."""
    from difflib import get_close_matches  # needed for the error message only

    index = _name_index()
    close = [index[key] for key in get_close_matches(_normalize_name(name), index, n=6, cutoff=0.6)]
    names = list(dict.fromkeys(close))[:3]
    return f" (did you mean {', '.join(names)}?)" if names else ""
