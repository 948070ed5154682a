"""What a worker may use: time, memory, and bytes written. Where the platform has no such limits, its parent's clock."""

from pathlib import Path
from typing import Any

MAX_MEMORY_BYTES = 4 << 30
"""Bytes that it may take beside what is there when it begins."""
MAX_WRITE_BYTES = 64 << 20
"""Bytes of a file that it may write."""


class TimeLimitError(BaseException):
    """The learner's time is over. No Exception, so that an `except Exception` in a loop does not catch it."""


def set_resource_limits(seconds: float) -> None:
    """What one learner may use. Where the platform has no such limits, the clock of the parent remains."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_WRITE_BYTES,
        resource.RLIMIT_CPU: int(used + seconds) + 1,
    }
    statm = Path("/proc/self/statm")
    if statm.exists():
        wanted[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    for which, most in wanted.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, hard))


def raise_time_limit(*_: Any) -> None:
    raise TimeLimitError
