"""Server-sent events for streamed completions, and the time limit of a request."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cutaway.serve.disconnect import ClientDisconnectedError, run_until_disconnect
from cutaway.serve.errors import APIError, shutdown_error
from cutaway.serve.limits import Limits
from cutaway.serve.openai.completion_stream import CompletionStream
from cutaway.serve.openai.serving_engine import to_api_error

T = TypeVar("T")


def _timeout_error(limits: Limits) -> APIError:
    message = f"the request was not finished within {limits.request_timeout:g} seconds; request fewer tokens"
    return APIError(408, message, code="timeout", headers={"x-should-retry": "false"})


async def with_cancellation(request: Request, work: Awaitable[T], limits: Limits) -> T:
    """Return the result of `work`. Cancel `work` and raise if the client disconnects or the request times out."""
    try:
        async with asyncio.timeout(limits.request_timeout):
            return await run_until_disconnect(work, request.receive)
    except TimeoutError:
        raise _timeout_error(limits) from None


def _format_sse_event(data: Mapping[str, object]) -> bytes:
    event = f"event: {data['type']}\n".encode() if "type" in data else b""  # named events of /v1/responses
    return event + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class SSEResponse(Response):
    """Streaming response of server-sent events. Generation is aborted when the response ends, for whatever reason."""

    media_type = "text/event-stream"

    def __init__(self, stream: CompletionStream, chunks: AsyncIterator[Mapping[str, object]], limits: Limits) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.stream, self.chunks, self.limits = stream, chunks, limits
        self.is_open = False
        """Whether the response has started and its last event has not been sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async def send_events() -> None:
            self.is_open = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write_events(write)

        try:
            with suppress(ClientDisconnectedError):
                await run_until_disconnect(send_events(), receive)
        except asyncio.CancelledError:  # the server shuts down
            if self.is_open:
                await write(_format_sse_event(shutdown_error().to_dict()))
                await write(b"data: [DONE]\n\n", more=False)
            raise
        finally:
            self.stream.abort()

    async def _write_events(self, write: Callable[..., Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                async for chunk in self.chunks:
                    await write(_format_sse_event(chunk))
        except TimeoutError:
            await write(_format_sse_event(_timeout_error(self.limits).to_dict()))
        except Exception as error:  # the status line is already sent, so the error is an event of the stream
            await write(_format_sse_event(to_api_error(error).to_dict()))
        self.is_open = False
        await write(b"data: [DONE]\n\n", more=False)
