"""Device capabilities: free memory, Triton, oneDNN, native bf16."""

import functools
import os
from importlib.util import find_spec
from pathlib import Path

import torch

GIB = 2**30


def free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    free = _linux_available_memory() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _cgroup_available_memory()
    return free if limit is None else min(free, limit)


def _linux_available_memory() -> int | None:
    """MemAvailable of /proc/meminfo in bytes; None if the file or the entry does not exist."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            found = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def _cgroup_available_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's control group, such as that of a container, may still use; None if unlimited.

    Cached file pages count as available, as in MemAvailable."""
    try:
        group = root / Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip().lstrip("/")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    cached = int(statistics.get("inactive_file", 0)) + int(statistics.get("active_file", 0))
    return None if limit == "max" else max(0, int(limit) - used + cached)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def has_onednn() -> bool:
    """Whether PyTorch was built with oneDNN, which packed CPU weights need."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_native_bf16() -> bool:
    """Whether oneDNN supports bf16 on this CPU. If not, bf16 matrix products are hundreds of times slower."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
