"""Failpoints: named places at which a test kills the process with SIGKILL, as a power failure would."""

import os
import signal
import threading

from cutaway.errors import InputError

FAILPOINT_ENV = "CUTAWAY_FAILPOINT"
"""`name`, or `name:n` for the n-th time it is reached."""

_hit_counts: dict[str, int] = {}
_hit_counts_lock = threading.Lock()  # checkpoints are written in a thread


def hit_failpoint(name: str) -> None:
    """Kill the process if CUTAWAY_FAILPOINT names this failpoint; otherwise do nothing."""
    value = os.environ.get(FAILPOINT_ENV)
    if value is None:
        return
    failpoint, colon, count = value.rpartition(":")
    if not colon:
        failpoint, count = value, "1"
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"{FAILPOINT_ENV} is {value!r}; the count must be 1 or more: write 'name' or 'name:2'")
    if failpoint != name:
        return
    with _hit_counts_lock:
        _hit_counts[name] = _hit_counts.get(name, 0) + 1
        if _hit_counts[name] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
