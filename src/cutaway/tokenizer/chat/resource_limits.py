"""Time and memory limits of chat templates, which come with untrusted models and run in this process.

The size of a value is about its number of characters when printed, at most MAX_VALUE_SIZE. This bounds time and memory
of each step of a template; the deadline and the total size are checked between steps.
"""

import time
from collections.abc import MappingView
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

from jinja2.exceptions import SecurityError

T = TypeVar("T")
MAX_VALUE_SIZE = 4_000_000
"""Maximum size of one value, and of the output, in characters."""
_MAX_TOTAL_SIZE = 64_000_000
"""Maximum total size of all values created in one rendering, which could all be in memory at once."""
MAX_SECONDS = 2.0
"""Maximum CPU time of one rendering, in seconds. CPU time does not depend on other work on the machine."""
ITEM_SIZE = 16
"""Size of an entry of a list or dict, in addition to its value."""
MAX_INT_BITS = 4096
"""Maximum number of bits of an integer."""


class ResourceMeter:
    """Measures and limits the CPU time and the total size of all values of one rendering, which runs in one thread."""

    def __init__(self) -> None:
        self._total_size = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def check_time(self) -> None:
        """Raise SecurityError if the rendering has used more than MAX_SECONDS of CPU time."""
        if time.thread_time() > self._deadline:
            raise SecurityError(f"it uses more than {MAX_SECONDS:g} seconds of CPU time")

    def check_size(self, size: int) -> None:
        """Raise SecurityError if a new value of this size would be too large, or if the CPU time is used up."""
        self.check_time()
        if size > MAX_VALUE_SIZE:
            raise SecurityError(f"it creates a value of more than {MAX_VALUE_SIZE:,} characters")

    def charge_value(self, value: T) -> T:
        """Check the size of a new value, add it to the total (a list or dict without its items); return the value."""
        self.check_size(estimate_size(value))
        if isinstance(value, str):
            self._charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self._charge(ITEM_SIZE * len(value))
        return value

    def charge_output(self, text: str) -> str:
        """Add the length of rendered text to the total size; return the text."""
        self.check_time()
        self._charge(len(text))
        return text

    def _charge(self, size: int) -> None:
        self._total_size += size
        if self._total_size > _MAX_TOTAL_SIZE:
            raise SecurityError(f"it creates values and output of more than {_MAX_TOTAL_SIZE:,} characters in total")


CURRENT_METER: ContextVar[ResourceMeter] = ContextVar("cutaway_chat_meter")


def estimate_size(value: object) -> int:
    """Approximate number of characters of a printed value. Counting stops above MAX_VALUE_SIZE."""
    total = 0
    pending: list[object] = [value]
    while pending and total <= MAX_VALUE_SIZE:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            if item.bit_length() > MAX_INT_BITS:
                raise SecurityError(f"it uses integers of more than {MAX_INT_BITS} bits")
            total += 1 + item.bit_length() // 3
        elif isinstance(item, dict | list | tuple | MappingView):
            total += ITEM_SIZE * len(item)
            pending += islice(iter(item), MAX_VALUE_SIZE // ITEM_SIZE)  # type: ignore[arg-type]
            if isinstance(item, dict):
                pending += islice(item.values(), MAX_VALUE_SIZE // ITEM_SIZE)
        else:
            total += 1
    return total
