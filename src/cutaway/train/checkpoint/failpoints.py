"""Named places at which a test can have the process die, as it would without power: nothing is cleaned up."""

import os
import signal
import threading

from cutaway.errors import InputError

FAILPOINT_ENV = "CUTAWAY_FAILPOINT"
"""`name`, or `name:n` for the n-th time that it is reached."""

_hit_counts: dict[str, int] = {}
_hit_counts_lock = threading.Lock()  # checkpoints are written by a thread of their own


def hit_failpoint(name: str) -> None:
    """Die by SIGKILL if this is the place that the environment names; otherwise do nothing."""
    wanted = os.environ.get(FAILPOINT_ENV)
    if wanted is None:
        return
    place, colon, times = wanted.rpartition(":")
    if not colon:
        place, times = wanted, "1"
    if not times.isdecimal() or int(times) < 1:
        raise InputError(f"{FAILPOINT_ENV} is {wanted!r}, which has no count of 1 or more; write 'name' or 'name:2'")
    if place != name:
        return
    with _hit_counts_lock:
        _hit_counts[name] = _hit_counts.get(name, 0) + 1
        if _hit_counts[name] == int(times):
            os.kill(os.getpid(), signal.SIGKILL)
