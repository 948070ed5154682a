"""JSON responses: large ones are built and encoded in a thread."""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial

from starlette.responses import JSONResponse, Response

MAX_INLINE_VALUES = 4096
"""Responses with more values than this are built in a thread. Fewer take about a millisecond of the event loop."""

ITEMS_PER_PART = 4096
"""Numbers or strings of a list that are encoded in one call."""


async def json_response(build: Callable[[], Mapping[str, object]], num_values: int) -> Response:
    """Return a response whose body is the result of `build`, which has about `num_values` numbers and strings."""
    if num_values <= MAX_INLINE_VALUES:
        return JSONResponse(build())
    body = await asyncio.to_thread(lambda: encode_json(build()))
    return Response(body, media_type="application/json")


def encode_json(data: Mapping[str, object]) -> bytes:
    """Encode an object. Lists in it are encoded in parts: one call for all of them would block other threads."""
    encode = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    fields = []
    for name, value in data.items():
        if isinstance(value, list):
            # Numbers and strings are encoded together, objects one by one.
            size = ITEMS_PER_PART if value and isinstance(value[0], int | str) else 1
            text = ",".join(encode(value[start : start + size])[1:-1] for start in range(0, len(value), size))
            fields.append(f"{encode(name)}:[{text}]")
        else:
            fields.append(f"{encode(name)}:{encode(value)}")
    return f"{{{','.join(fields)}}}".encode()
