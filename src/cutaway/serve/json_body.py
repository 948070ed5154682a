"""Parsing of untrusted JSON bodies. Nesting depth and number of values are checked before parsing."""

import asyncio
import heapq
import itertools
import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE_PATTERN = re.compile(rb"\\u[dD][89a-fA-F]")
JSON_VALUE = "cutaway.json"
"""Key of the ASGI scope for the value of the body."""
INLINE_BODY_BYTES = 16 * 2**10
"""Bodies up to this size are parsed on the event loop, which takes up to two milliseconds."""
LARGE_BODY_TIME_SHARE = 0.25
"""Maximum share of the time that is spent on parsing larger bodies."""
_SECONDS_PER_BYTE = 1e-6
"""A larger body is parsed after a smaller one that arrived up to this time × the difference of their sizes later."""


class JSONBodyParser:
    """Parses bodies so that other requests are not delayed.

    Large bodies are parsed in a thread, one at a time, and at most for `LARGE_BODY_TIME_SHARE` of the time: a thread
    would otherwise take the interpreter lock from the event loop and from the engine. Small ones have precedence.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pool = ThreadPoolExecutor(1, "cutaway json")
        self._inline_lock = asyncio.Lock()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        """Heap of the large bodies that wait to be parsed: (priority, arrival number, future)."""
        self._arrivals = itertools.count()
        self._is_busy = False

    async def parse(self, body: bytes) -> object:
        """Return the value of a JSON body. Raise an APIError as `parse_json_body` does."""
        if len(body) <= INLINE_BODY_BYTES:
            # One body is parsed per iteration of the event loop, in FIFO order. Parsing the bodies of hundreds of
            # requests in one iteration would delay every other request.
            async with self._inline_lock:
                await asyncio.sleep(0)
                return parse_json_body(body, self.limits)
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        priority = loop.time() + len(body) * _SECONDS_PER_BYTE
        heapq.heappush(self._waiting, (priority, next(self._arrivals), turn))
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._finish()
            raise
        start_time = time.monotonic()
        try:
            return await asyncio.shield(loop.run_in_executor(self._pool, parse_json_body, body, self.limits))
        finally:
            pause = (time.monotonic() - start_time) * (1 / LARGE_BODY_TIME_SHARE - 1)
            loop.call_later(pause, self._finish)

    def _finish(self) -> None:
        self._is_busy = False
        self._start_next()

    def _start_next(self) -> None:
        while self._waiting and not self._is_busy:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                self._is_busy = True
                turn.set_result(None)


def parse_json_body(body: bytes, limits: Limits) -> object:
    """Return the value of a JSON body. Raise an APIError unless it is valid and within the limits.

    It must be UTF-8 without lone surrogates, each object must have unique keys, and numbers must be finite.
    """
    _check_structure(body, limits)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
        if _SURROGATE_PATTERN.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise APIError(400, "the body is not UTF-8; encode it as UTF-8") from None
    except UnicodeEncodeError:
        raise APIError(400, "the JSON body has a lone surrogate; send surrogates in pairs") from None
    except json.JSONDecodeError as error:
        raise APIError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # int() rejects integers of thousands of digits
        raise APIError(400, "the JSON body has a number with too many digits; send a shorter number") from None
    return value


def _check_structure(body: bytes, limits: Limits) -> None:
    """Raise if there are too many values, if they are nested too deep, or if a bracket is closed that is not open.

    Only operations of bytes and NumPy run over the whole body, which takes a few milliseconds per megabyte.
    """
    too_many = APIError(400, f"the JSON body has more than {limits.max_json_values} values; send a smaller request")
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that remains begins or ends a string
    if text.count(b'"') > 4 * limits.max_json_values:  # a value of an object may be a string, and its key is one
        raise too_many
    structure = b"".join(text.split(b'"')[::2])  # without the strings
    num_opened = structure.count(b"[") + structure.count(b"{")
    num_closed = structure.count(b"]") + structure.count(b"}")
    if structure.count(b",") + max(num_opened, num_closed) + 1 > limits.max_json_values:
        raise too_many
    brackets = np.frombuffer(structure.translate(None, _NO_BRACKETS), np.uint8)
    depths = np.cumsum(np.where((brackets == ord("[")) | (brackets == ord("{")), 1, -1))
    if (depths < 0).any():
        raise APIError(400, "the body is not JSON: it has a closing bracket without an opening one")
    if (depths > limits.max_json_depth).any():
        raise APIError(400, f"the JSON body is nested deeper than {limits.max_json_depth} levels; flatten it")


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the pairs as a dict. Raise if a key occurs twice, because parsers disagree on which value counts."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise APIError(400, "the JSON body has an object with a duplicate key; send each key once")
    return value


def _reject_constant(name: str) -> float:
    raise APIError(400, f"the JSON body has {name}, which is not a JSON number; send a finite number")


def _parse_finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise APIError(400, "the JSON body has a number outside the float64 range; send a smaller one")
    return number
