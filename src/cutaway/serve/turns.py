"""A crowd let in one by one, so that the event loop looks around between any two of them."""

import asyncio
from collections import deque


class Turns:
    """Work of a millisecond, done for hundreds who came at once, would keep everybody else waiting for its sum."""

    def __init__(self) -> None:
        self.line: deque[asyncio.Future[None]] = deque()

    async def mine(self) -> None:
        """Returns when it is the caller's turn: one in each round of the event loop."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self.line.append(turn)
        if len(self.line) == 1:
            loop.call_soon(self.next, loop)
        await turn

    def next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self.line and self.line[0].done():  # whoever left the line
            self.line.popleft()
        if self.line:
            self.line.popleft().set_result(None)
        if self.line:
            loop.call_soon(self.next, loop)
