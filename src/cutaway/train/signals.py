"""Asking a run to stop: by SIGTERM, or by Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def asked_to_stop(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C end a run after the step at hand, with a checkpoint; a second Ctrl-C at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
