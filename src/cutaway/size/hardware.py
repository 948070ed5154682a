"""What devices can do at most: published dense peaks and capacities, read from `hardware.toml` beside this file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from pathlib import Path

from cutaway.errors import InputError

MIN_FIGURE, MAX_FIGURE = 1, 1e30
"""Bytes, and rates a second, between which every answer is finite."""

HARDWARE_KINDS = ("data-center", "workstation", "consumer", "apple", "cpu")

_HALF_PRECISION = ("bf16", "fp16", "fp32")
COMPUTE_DTYPES = {
    "fp32": ("fp32", "bf16"),  # TPUs and Gaudis publish no fp32 rate; theirs is no higher than bf16's
    "tf32": ("tf32", "fp32", "bf16"),
    "bf16": _HALF_PRECISION,  # Volta and Turing have no bf16
    "fp16": ("fp16", "fp32", "bf16"),
    "mixed": _HALF_PRECISION,
    "fp8": ("fp8", *_HALF_PRECISION),
    "int8": _HALF_PRECISION,  # weights are unpacked before the product
    "int4": _HALF_PRECISION,
}
"""The rates that stand for products in each dtype, best first: the first that a device has is taken."""

_VENDOR_WORDS = {
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "radeon",
    "instinct",
    "intel",
    "xeon",
    "platinum",
    "core",
    "apple",
}
_VENDOR_WORDS |= {"google", "cloud", "aws", "gpu", "graphics", "r", "tm"}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device. Rates are peaks that a measurement should not beat; what nobody published is None or left out."""

    name: str
    title: str
    kind: str
    bandwidth: float
    """Bytes a second to its memory."""
    flops: Mapping[str, float] = field(hash=False)
    """Dense operations a second by dtype, with fp32 accumulation."""
    memory: float | None = None
    """Bytes; for shared and pluggable memory, the most it takes."""
    interconnect_bandwidth: float | None = None
    """Bytes a second one way, to all its neighbors together."""
    tdp_watts: float | None = None
    year: int | None = None
    source: str
    verified_date: str
    note: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        figures = {"bandwidth": self.bandwidth, **{f"flops in {dtype}": rate for dtype, rate in self.flops.items()}}
        figures |= {} if self.memory is None else {"memory": self.memory}
        for what, value in figures.items():
            real = isinstance(value, Real) and not isinstance(value, bool)
            if not (real and MIN_FIGURE <= value <= MAX_FIGURE):
                raise InputError(f"{what} is {value!r}, which no device has: give a plain number from 1 to 1e30")

    def compute_dtype(self, dtype: str) -> str:
        """The dtype whose rate stands for products in this one: bf16 for int8 weights, fp16 on a T4, and so on."""
        if dtype not in COMPUTE_DTYPES:
            raise InputError(f"no device has a rate for {dtype!r} here: choose one of {', '.join(COMPUTE_DTYPES)}")
        for known in COMPUTE_DTYPES[dtype]:
            if known in self.flops:
                return known
        raise InputError(
            f"{self.title} has rates for {', '.join(self.flops)} only, none of which serves {dtype}: "
            "choose one of those, or give the rate with --flops"
        )

    def peak_flops(self, dtype: str) -> float:
        """The peak for matrix products in this dtype, operations a second."""
        return self.flops[self.compute_dtype(dtype)]


def get_hardware(name: str) -> Hardware:
    """The device of this name, title or alias; case, spaces, dashes and the maker's name do not matter."""
    found = _name_index().get(_normalize_name(name))
    if found is None:
        raise InputError(
            f"no device called {name!r} is known{_suggest_names(name)}; "
            "choose a known one, or give your own figures with --bandwidth and --flops"
        )
    return _load_device(found)


def list_hardware() -> tuple[Hardware, ...]:
    """Every device of the table, by kind, then year, then name."""
    devices = (_load_device(name) for name in _toml_sections())
    return tuple(sorted(devices, key=lambda device: (HARDWARE_KINDS.index(device.kind), device.year or 0, device.name)))


def custom_hardware(
    *, bandwidth: float, flops: float, dtype: str | None = None, memory: float | None = None
) -> Hardware:
    """A device from figures that you measured or read. Without a dtype, `flops` holds for all of them."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise InputError(
            f"flops are given for {dtype!r}, which is not known: choose one of {', '.join(COMPUTE_DTYPES)}"
        )
    given = COMPUTE_DTYPES if dtype is None else (dtype,)
    return Hardware(
        name="custom",
        title="custom hardware",
        kind="custom",
        bandwidth=bandwidth,
        flops={COMPUTE_DTYPES[each][0]: flops for each in given},
        memory=memory,
        source="given by the user",
        verified_date="not checked",
    )


def _normalize_name(name: str) -> str:
    """Letters and digits without the maker's name: "NVIDIA GeForce RTX-4090" is "rtx4090"."""
    return "".join(word for word in re.findall("[a-z0-9]+", name.lower()) if word not in _VENDOR_WORDS)


@cache
def _toml_sections() -> dict[str, str]:
    """The text of each device's table. The whole file takes tomllib 10 ms and most runs need one device of it."""
    text = (Path(__file__).parent / "hardware.toml").read_text(encoding="utf-8")
    _, *parts = re.split(r"^\[(.+)\]$", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def _load_device(name: str) -> Hardware:
    import tomllib  # takes longer to load than all of this module

    row = tomllib.loads(_toml_sections()[name])
    return Hardware(name=name, aliases=tuple(row.pop("aliases", ())), **row)


@cache
def _name_index() -> dict[str, str]:
    """Keys of names, titles and aliases, without parsing the tables; a test holds it equal to the parsed ones."""
    index = {}
    for name, text in _toml_sections().items():
        lines = re.findall("^(?:title|aliases) = (.+)$", text, flags=re.MULTILINE)
        for word in (name, *re.findall('"(.+?)"', " ".join(lines))):
            index[_normalize_name(word)] = name
    return index


def _suggest_names(name: str) -> str:
    """A question naming the devices whose names look most alike, if any do."""
    from difflib import get_close_matches  # only a wrong name needs it

    index = _name_index()
    close = [index[key] for key in get_close_matches(_normalize_name(name), index, n=6, cutoff=0.6)]
    names = list(dict.fromkeys(close))[:3]
    return f" (did you mean {', '.join(names)}?)" if names else ""
