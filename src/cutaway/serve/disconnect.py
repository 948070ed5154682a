"""Cancellation of a request's work when the client disconnects."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from cutaway.serve.errors import APIError

T = TypeVar("T")


class ClientDisconnectedError(APIError):
    """The client disconnected before the response. The error is counted in the metrics and sent to nobody."""

    def __init__(self) -> None:
        super().__init__(499, "the client disconnected before the response")


async def run_until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnectedError."""
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.wait({work_task})
    if work_task.cancelled():
        raise ClientDisconnectedError
    return work_task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # other messages are ignored
