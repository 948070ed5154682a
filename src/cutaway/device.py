"""Device capabilities: free memory, Triton, oneDNN, native bf16."""

import functools
import os
from importlib.util import find_spec

import torch

GIB = 2**30


def free_memory(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    return _linux_available_memory() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _linux_available_memory() -> int | None:
    """MemAvailable of /proc/meminfo in bytes; None if the file or the entry does not exist."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            found = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


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
