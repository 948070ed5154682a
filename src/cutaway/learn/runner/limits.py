"""Resource limits of a worker: CPU time, memory, size of written files, no child processes and no network."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

MAX_MEMORY_BYTES = 4 << 30
"""Number of bytes that the worker may allocate in addition to what it uses at the start."""
_MAX_WRITE_BYTES = 64 << 20
"""Maximum size in bytes of a file that the worker may write."""


_FORBIDDEN_EVENTS = {
    "os.fork": "start processes",
    "os.forkpty": "start processes",
    "os.exec": "start processes",
    "os.posix_spawn": "start processes",
    "os.spawn": "start processes",
    "os.startfile": "start processes",
    "os.system": "start processes",
    "pty.spawn": "start processes",
    "subprocess.Popen": "start processes",
    "socket.bind": "use the network",
    "socket.connect": "use the network",
    "socket.getaddrinfo": "use the network",
    "socket.sendto": "use the network",
}
"""Audit events of the Python runtime that a learner's code must not cause → what they do."""


class ForbiddenOperationError(PermissionError):
    """The learner's code starts a process or uses the network."""


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


def forbid_processes_and_network() -> None:
    """Raise ForbiddenOperationError from now on if Python code starts a process or uses the network.

    This contains accidents such as a loop that forks. It is not a sandbox: native code can evade it.
    """
    sys.addaudithook(_check_audit_event)
    if (module := _import_posixsubprocess()) is not None:
        module.fork_exec = _refuse_process  # type: ignore[attr-defined]  # has no audit event in `multiprocessing`


def _import_posixsubprocess() -> ModuleType | None:
    """The module with which `subprocess` and `multiprocessing` start processes; None on Windows."""
    try:
        return import_module("_posixsubprocess")
    except ImportError:
        return None


def _refuse_process(*_: object) -> int:
    raise ForbiddenOperationError("the code of an exercise must not start processes")


def _check_audit_event(event: str, _: object) -> None:
    if event in _FORBIDDEN_EVENTS:
        raise ForbiddenOperationError(f"the code of an exercise must not {_FORBIDDEN_EVENTS[event]} ({event})")


def raise_time_limit(*_: object) -> None:
    """Signal handler of the timer, which raises TimeLimitError."""
    raise TimeLimitError
