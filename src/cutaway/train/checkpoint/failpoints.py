"""Failpoints: named places in the code at which a test kills the process with SIGKILL."""

import os
import signal
import threading
from collections import Counter

FAILPOINT_ENV = "CUTAWAY_FAILPOINT"
"""Environment variable with the `name` of a failpoint, or with `name:n` for the n-th time that it is reached."""

_hit_counts: Counter[str] = Counter()
_hit_counts_lock = threading.Lock()  # checkpoints are written in a thread


def hit_failpoint(name: str) -> None:
    """Kill the process if CUTAWAY_FAILPOINT names this failpoint; otherwise do nothing."""
    failpoint, _, count = os.environ.get(FAILPOINT_ENV, "").partition(":")
    if failpoint != name:
        return
    with _hit_counts_lock:
        _hit_counts[name] += 1
        if _hit_counts[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
