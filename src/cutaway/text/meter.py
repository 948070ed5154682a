"""What a chat template may spend. Templates come with models from strangers, and run in this process.

Every value that a template makes has a weight, about its characters when printed, and none may weigh more than LARGEST.
So each step of a template takes bounded time and memory, and between steps the clock and the total are looked at.
"""

import time
from collections.abc import MappingView
from contextvars import ContextVar
from itertools import islice
from typing import Any

from jinja2.exceptions import SecurityError

LARGEST = 4_000_000
"""Weight of one value, and of the whole output."""
TOTAL = 64_000_000
"""Characters and places of all values made in one rendering: what could be kept in memory at once."""
SECONDS = 2.0
ITEM = 16
"""What a place in a list or an object weighs beside its value."""
BITS = 4096
"""Of the largest whole number."""


class Meter:
    def __init__(self) -> None:
        self._spent = 0
        self._end = time.monotonic() + SECONDS

    def tick(self) -> None:
        if time.monotonic() > self._end:
            raise SecurityError(f"it runs longer than {SECONDS:g} seconds")

    def allow(self, weight: int) -> None:
        """Ask before a value of this weight is made."""
        self.tick()
        if weight > LARGEST:
            raise SecurityError(f"it makes a value of more than {LARGEST:,} characters")

    def made(self, value: Any) -> Any:
        """Pay for a value just made: its whole weight is bounded, and what it adds to the memory is counted."""
        self.allow(weight_of(value))
        if isinstance(value, str):
            self._pay(len(value))
        elif isinstance(value, list | tuple | dict):
            self._pay(ITEM * len(value))
        return value

    def write(self, text: str) -> str:
        self.tick()
        self._pay(len(text))
        return text

    def _pay(self, size: int) -> None:
        self._spent += size
        if self._spent > TOTAL:
            raise SecurityError(f"it makes and writes more than {TOTAL:,} characters in all")


METER: ContextVar[Meter] = ContextVar("cutaway_chat_meter")


def weight_of(value: Any) -> int:
    """About the characters of a value when printed: a list that stands twice in a list counts twice."""
    total, waiting = 0, [value]
    while waiting and total <= LARGEST:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, int):
            if one.bit_length() > BITS:
                raise SecurityError(f"it computes with numbers of more than {BITS} bits")
            total += 1 + one.bit_length() // 3
        elif isinstance(one, dict | list | tuple | MappingView):
            total += ITEM * len(one)
            waiting += islice(iter(one), LARGEST // ITEM)  # type: ignore[arg-type]
            if isinstance(one, dict):
                waiting += islice(one.values(), LARGEST // ITEM)
        else:
            total += 1
    return total
