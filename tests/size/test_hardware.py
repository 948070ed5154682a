"""The hardware table: published figures, complete entries, unique names."""

import math
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from cutaway.errors import InputError
from cutaway.size import hardware
from cutaway.size.hardware import (
    COMPUTE_DTYPES,
    HARDWARE_KINDS,
    Hardware,
    _name_index,
    _normalize_name,
    custom_hardware,
    get_hardware,
    list_hardware,
)

TEXT = (Path(str(hardware.__file__)).parent / "hardware.toml").read_text(encoding="utf-8")
ROWS = tomllib.loads(TEXT)
GIB = 2**30
TERA = 1e12


def normalized_names(device: Hardware) -> set[str]:
    return {_normalize_name(name) for name in (device.name, device.title, *device.aliases)}


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("v100", "fp16", 125),
        ("t4", "fp16", 65),
        ("a10", "bf16", 125),
        ("a100", "fp32", 19.5),
        ("a100", "tf32", 156),
        ("a100", "bf16", 312),
        ("a40", "bf16", 149.7),
        ("l40", "bf16", 181.05),
        ("l40s", "bf16", 362.05),
        ("h100", "fp32", 67),
        ("h100", "bf16", 989.4),
        ("h100", "fp8", 1978.9),
        ("h200", "bf16", 989.4),
        ("h20", "bf16", 148),
        ("b200", "bf16", 2250),
        ("gb200", "bf16", 2500),
        ("rtx pro 6000", "bf16", 503.8),
        ("rtx 3090", "bf16", 71.2),  # with fp32 accumulation, not 142
        ("rtx 4090", "bf16", 165.2),  # not 330.3
        ("rtx 4090", "fp8", 330.3),
        ("rtx 4080", "bf16", 97.5),
        ("rtx 5090", "bf16", 209.5),
        ("rtx 2080 ti", "fp16", 56.9),
        ("mi250x", "bf16", 383),
        ("mi300x", "bf16", 1307.4),
        ("mi355x", "fp8", 5033.2),
        ("tpu v4", "bf16", 275),
        ("tpu v5e", "bf16", 197),
        ("tpu v5p", "bf16", 459),
        ("trn2", "bf16", 667),
        ("gaudi 3", "bf16", 1835),
        ("m1 max", "fp32", 10.6),
    ],
)
def test_peak_flops_match_published_dense_figures(name: str, dtype: str, tera: float) -> None:
    assert get_hardware(name).peak_flops(dtype) == pytest.approx(tera * TERA, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "gb_per_second", "memory"),
    [
        ("a100-sxm-80gb", 2039, 80 * GIB),
        ("a100-pcie-40gb", 1555, 40 * GIB),
        ("h100", 3350, 81_559 * 2**20),
        ("h200", 4800, 143_771 * 2**20),
        ("t4", 320, 15_360 * 2**20),
        ("rtx 3090", 936.2, 24 * GIB),
        ("rtx 4090", 1008, 24 * GIB),
        ("rtx 5090", 1792, 32 * GIB),
        ("mi325x", 6000, 256 * GIB),
        ("tpu v5e", 819, 16 * GIB),
        ("m3 ultra", 819.2, 512 * GIB),
        ("dgx spark", 273, 128 * GIB),
        ("epyc 9654", 460.8, 6144 * GIB),
    ],
)
def test_bandwidth_and_memory_match_published_figures(name: str, gb_per_second: float, memory: float) -> None:
    device = get_hardware(name)
    assert device.bandwidth == pytest.approx(gb_per_second * 1e9, rel=1e-3)
    assert device.memory == memory


@pytest.mark.parametrize("device", list_hardware(), ids=lambda device: device.name)
def test_entries_are_complete(device: Hardware) -> None:
    figures = [device.bandwidth, device.memory, *device.flops.values()]
    figures += [figure for figure in (device.interconnect_bandwidth, device.tdp_watts) if figure is not None]
    assert all(figure is not None and figure > 0 and math.isfinite(figure) for figure in figures)
    assert device.flops.keys() & {"fp32", "bf16", "fp16"}
    assert device.flops.keys() <= {"fp32", "tf32", "bf16", "fp16", "fp8", "int8"}
    assert device.kind in HARDWARE_KINDS
    assert device.title
    assert device.source
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", device.verified_date)
    assert device.year is not None
    assert 2016 <= device.year <= 2026
    assert device.memory >= 4 * GIB
    assert 10e9 < device.bandwidth < 10e12  # catches a wrong power of ten
    rates = [device.flops[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in device.flops]
    assert rates == sorted(rates)  # narrower dtypes are not slower
    assert all(device.peak_flops(dtype) > 0 for dtype in COMPUTE_DTYPES)


def test_derived_rates_equal_units_times_clock() -> None:
    num_derived = 0
    for device in list_hardware():
        match = re.match(r"derived: (\d+) [\w-]+ x ([\d.]+) GHz x \((.+?)\)", device.source)
        if match is None:
            continue
        units, clock = int(match[1]), float(match[2]) * 1e9
        operations = {dtype: int(count) for count, dtype in re.findall(r"(\d+) (\w+)", match[3])}
        assert operations.keys() == device.flops.keys(), device.name
        for dtype, count in operations.items():
            assert device.flops[dtype] == pytest.approx(units * clock * count, rel=1e-3), (device.name, dtype)
        num_derived += 1
    assert num_derived > 60


def test_dtype_ratios_within_a_vendor() -> None:
    for name in ("h100", "h800", "h100 pcie", "h100 nvl", "h200", "h200 nvl", "h20", "gh200", "b200", "gb200", "b300"):
        device = get_hardware(name)
        assert device.peak_flops("fp8") == pytest.approx(2 * device.peak_flops("bf16"), rel=1e-2)
        assert device.peak_flops("bf16") == pytest.approx(2 * device.peak_flops("tf32"), rel=1e-2)
    for device in list_hardware():
        if "GeForce" in device.title and (device.year or 0) >= 2020:
            assert device.peak_flops("bf16") == pytest.approx(2 * device.peak_flops("fp32"), rel=1e-2)
            assert device.peak_flops("tf32") == device.peak_flops("fp32")


def test_names_are_unique() -> None:
    owner: dict[str, str] = {}
    for device in list_hardware():
        for name in normalized_names(device):
            assert name
            assert owner.setdefault(name, device.name) == device.name, name
    assert _name_index() == owner


def test_devices_equal_the_parsed_toml() -> None:
    assert {device.name for device in list_hardware()} == ROWS.keys()
    for device in list_hardware():
        row = {key: value for key, value in asdict(device).items() if value not in (None, "", ()) and key != "name"}
        assert row == {**ROWS[device.name], **({"aliases": device.aliases} if device.aliases else {})}


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("H100", "NVIDIA H100 SXM 80GB"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX-4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA H200", "NVIDIA H200 SXM 141GB"),
        ("a100", "NVIDIA A100 SXM 80GB"),
        ("4060 ti", "NVIDIA GeForce RTX 4060 Ti 8GB"),
        ("m2 ultra", "Apple M2 Ultra (76-core GPU)"),
        ("TPU v5 lite", "Google TPU v5e"),
        # names that drivers report
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 PCIe 80GB"),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM2 32GB"),
        ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3060 12GB"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("Intel(R) Arc(TM) B580 Graphics", "Intel Arc B580"),
        ("Apple M4 Max", "Apple M4 Max (40-core GPU)"),
    ],
)
def test_name_variants(name: str, title: str) -> None:
    assert get_hardware(name).title == title


def test_unknown_name_error_suggests_close_names() -> None:
    with pytest.raises(InputError, match=r"'rtx 4091'.*rtx-4090.*--bandwidth and --flops"):
        get_hardware("rtx 4091")
    for name in ("", "nvidia", "banana", "??"):
        with pytest.raises(InputError, match="--bandwidth and --flops"):
            get_hardware(name)


def test_compute_dtype_fallbacks() -> None:
    h100, turing, pascal, tpu, epyc = (get_hardware(name) for name in ("h100", "t4", "1080 ti", "tpu v4", "epyc 7763"))
    for dtype in ("mixed", "int8", "int4"):
        assert h100.peak_flops(dtype) == h100.peak_flops("bf16") == h100.flops["bf16"]
    assert h100.peak_flops("fp32") == 67 * TERA < h100.peak_flops("tf32")
    assert get_hardware("a100").peak_flops("fp8") == get_hardware("a100").peak_flops("bf16")
    assert turing.compute_dtype("bf16") == turing.compute_dtype("int8") == "fp16"
    assert pascal.compute_dtype("fp16") == pascal.compute_dtype("tf32") == "fp32"
    assert tpu.compute_dtype("fp32") == tpu.compute_dtype("fp16") == "bf16"
    assert epyc.compute_dtype("mixed") == "fp32"
    assert get_hardware("epyc 9654").compute_dtype("fp16") == "fp32"
    with pytest.raises(InputError, match=r"'fp64'.*use one of fp32"):
        h100.peak_flops("fp64")


def test_list_hardware_is_sorted() -> None:
    order = [(HARDWARE_KINDS.index(device.kind), device.year, device.name) for device in list_hardware()]
    assert order == sorted(order)
    assert {device.kind for device in list_hardware()} == set(HARDWARE_KINDS)


def test_custom_hardware() -> None:
    device = custom_hardware(bandwidth=1e12, flops=2e14, memory=8e9)
    assert device.bandwidth == 1e12
    assert device.memory == 8e9
    assert all(device.peak_flops(dtype) == 2e14 for dtype in COMPUTE_DTYPES)
    assert custom_hardware(bandwidth=1e12, flops=2e14, dtype="fp16").peak_flops("bf16") == 2e14
    with pytest.raises(InputError, match=r"fp8 only.*--flops"):
        custom_hardware(bandwidth=1e12, flops=2e14, dtype="fp8").peak_flops("bf16")
    with pytest.raises(InputError, match="'fp64'"):
        custom_hardware(bandwidth=1e12, flops=2e14, dtype="fp64")
    for invalid in (0.0, -1.0, math.nan, math.inf):
        for figure in ("bandwidth", "flops", "memory"):
            with pytest.raises(InputError, match=figure):
                custom_hardware(**{"bandwidth": 1e12, "flops": 1e14, "memory": 1e9, figure: invalid})


def test_devices_compare_by_value() -> None:
    assert get_hardware("h100") == get_hardware("NVIDIA H100")
    assert len({get_hardware("h100"), get_hardware("h100 sxm"), get_hardware("h200")}) == 2


def test_hardware_imports_no_torch() -> None:
    code = (
        "import sys; from cutaway.size.hardware import list_hardware; list_hardware();"
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
