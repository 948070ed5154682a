"""Answers that are sent as they grow, and ends that are noticed: a client that leaves takes its request with it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cutaway.serve.limits import Limits
from cutaway.serve.openai.asked import Asked
from cutaway.serve.openai.host import why
from cutaway.serve.refusal import Refused

T = TypeVar("T")


async def left(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        """What else comes is of no interest."""


def late(limits: Limits) -> Refused:
    message = f"the answer was not complete within {limits.seconds:g} seconds; ask for fewer tokens"
    return Refused(408, message, code="timeout", headers={"x-should-retry": "false"})


async def unless_left(request: Request, work: Awaitable[T], limits: Limits) -> T:
    """The result of some work, which ends when the client leaves or its time is over."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(request.receive))
    try:
        async with asyncio.timeout(limits.seconds):
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise late(limits) from None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if working.cancelled():
        raise Refused(499, "the client left before its answer")
    return working.result()


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Events(Response):
    """An answer as server-sent events. However it ends, nothing goes on working for it."""

    media_type = "text/event-stream"

    def __init__(self, asked: Asked, chunks: Callable[[], AsyncIterator[dict[str, Any]]], limits: Limits) -> None:
        self.status_code, self.body, self.background = 200, b"", None
        self.init_headers({"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.asked, self.chunks, self.limits = asked, chunks, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pouring, leaving = asyncio.ensure_future(self.pour(send)), asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({pouring, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.asked.cancel()
            leaving.cancel()
            pouring.cancel()
            await asyncio.wait({pouring})
        if not pouring.cancelled():
            pouring.result()

    async def pour(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with asyncio.timeout(self.limits.seconds):
                async for chunk in self.chunks():
                    await write(event(chunk))
        except TimeoutError:
            await write(event(late(self.limits).body))
        except Exception as error:  # the status is said already; the client finds the error in the stream
            await write(event(why(error).body))
        await write(b"data: [DONE]\n\n", more=False)
