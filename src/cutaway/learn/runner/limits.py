"""Resource limits of a worker: CPU time, memory, and size of written files."""

from pathlib import Path

MAX_MEMORY_BYTES = 4 << 30
"""Number of bytes that the worker may allocate in addition to what it uses at the start."""
_MAX_WRITE_BYTES = 64 << 20
"""Maximum size in bytes of a file that the worker may write."""


class TimeLimitError(BaseException):
    """The time limit is exceeded. It is a BaseException, so that `except Exception` in a loop does not catch it."""


def set_resource_limits(seconds: float) -> None:
    """Limit the CPU time (to `seconds` from now), memory and file size of the current process.

    On platforms without `resource`, only the launcher's timeout applies."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: _MAX_WRITE_BYTES,
        resource.RLIMIT_CPU: int(used + seconds) + 1,
    }
    statm = Path("/proc/self/statm")
    if statm.exists():
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    for resource_id, limit in limits.items():
        hard = resource.getrlimit(resource_id)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource_id, (limit, hard))


def raise_time_limit(*_: object) -> None:
    """Signal handler of the timer, which raises TimeLimitError."""
    raise TimeLimitError
