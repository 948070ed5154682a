"""Server-sent events for streamed completions, and cancellation when the client disconnects."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cutaway.serve.errors import APIError
from cutaway.serve.limits import Limits
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.serving_engine import to_api_error

T = TypeVar("T")


async def listen_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass  # other messages are ignored


def _timeout_error(limits: Limits) -> APIError:
    message = f"the completion was not finished within {limits.request_timeout:g} seconds; request fewer tokens"
    return APIError(408, message, code="timeout", headers={"x-should-retry": "false"})


async def with_cancellation(request: Request, work: Awaitable[T], limits: Limits) -> T:
    """Await `work`; cancel it when the client disconnects or the request times out."""
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(listen_for_disconnect(request.receive))
    try:
        async with asyncio.timeout(limits.request_timeout):
            await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise _timeout_error(limits) from None
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.wait({work_task})
    if work_task.cancelled():
        raise APIError(499, "the client disconnected before the response")
    return work_task.result()


def format_sse_event(data: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class SSEResponse(Response):
    """Streaming response of server-sent events; generation is aborted however the response ends."""

    media_type = "text/event-stream"

    def __init__(self, stream: CompletionStream, chunks: AsyncIterator[Mapping[str, object]], limits: Limits) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.stream, self.chunks, self.limits = stream, chunks, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_task = asyncio.ensure_future(self._send_events(send))
        disconnect_task = asyncio.ensure_future(listen_for_disconnect(receive))
        try:
            await asyncio.wait({send_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.stream.abort()
            disconnect_task.cancel()
            send_task.cancel()
            await asyncio.wait({send_task})
        if not send_task.cancelled():
            send_task.result()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async with asyncio.timeout(self.limits.request_timeout):
                async for chunk in self.chunks:
                    await write(format_sse_event(chunk))
        except TimeoutError:
            await write(format_sse_event(_timeout_error(self.limits).to_dict()))
        except Exception as error:  # the status line is already sent, so the error is an event of the stream
            await write(format_sse_event(to_api_error(error).to_dict()))
        await write(b"data: [DONE]\n\n", more=False)
