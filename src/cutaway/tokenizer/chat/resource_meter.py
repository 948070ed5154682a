"""What a chat template may spend. Templates come with models from strangers, and run in this process.

Every value that a template makes has a size, about its characters when printed, and none may be larger than
MAX_VALUE_SIZE. So each step of a template takes bounded time and memory, and between steps the clock and the total are
looked at.
"""

import time
from collections.abc import MappingView
from contextvars import ContextVar
from itertools import islice
from typing import Any

from jinja2.exceptions import SecurityError

MAX_VALUE_SIZE = 4_000_000
"""Size of one value, and of the whole output."""
MAX_TOTAL_SIZE = 64_000_000
"""Characters and places of all values made in one rendering: what could be kept in memory at once."""
MAX_SECONDS = 2.0
ITEM_SIZE = 16
"""What a place in a list or an object counts beside its value."""
MAX_INT_BITS = 4096
"""Of the largest whole number."""


class ResourceMeter:
    def __init__(self) -> None:
        self._total_size = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def check_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs longer than {MAX_SECONDS:g} seconds")

    def check_size(self, size: int) -> None:
        """Ask before a value of this size is made."""
        self.check_time()
        if size > MAX_VALUE_SIZE:
            raise SecurityError(f"it makes a value of more than {MAX_VALUE_SIZE:,} characters")

    def charge_value(self, value: Any) -> Any:
        """Pay for a value just made: its whole size is bounded, and what it adds to the memory is counted."""
        self.check_size(estimate_size(value))
        if isinstance(value, str):
            self._charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self._charge(ITEM_SIZE * len(value))
        return value

    def charge_output(self, text: str) -> str:
        self.check_time()
        self._charge(len(text))
        return text

    def _charge(self, size: int) -> None:
        self._total_size += size
        if self._total_size > MAX_TOTAL_SIZE:
            raise SecurityError(f"it makes and writes more than {MAX_TOTAL_SIZE:,} characters in all")


CURRENT_METER: ContextVar[ResourceMeter] = ContextVar("cutaway_chat_meter")


def estimate_size(value: Any) -> int:
    """About the characters of a value when printed: a list that stands twice in a list counts twice."""
    total, waiting = 0, [value]
    while waiting and total <= MAX_VALUE_SIZE:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, int):
            if one.bit_length() > MAX_INT_BITS:
                raise SecurityError(f"it computes with numbers of more than {MAX_INT_BITS} bits")
            total += 1 + one.bit_length() // 3
        elif isinstance(one, dict | list | tuple | MappingView):
            total += ITEM_SIZE * len(one)
            waiting += islice(iter(one), MAX_VALUE_SIZE // ITEM_SIZE)  # type: ignore[arg-type]
            if isinstance(one, dict):
                waiting += islice(one.values(), MAX_VALUE_SIZE // ITEM_SIZE)
        else:
            total += 1
    return total
