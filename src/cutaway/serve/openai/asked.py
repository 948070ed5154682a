"""Answers on their way, as the event loop sees them: the engine works in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from cutaway.generate import Generation, Piece, Ticket
from cutaway.serve.metrics import Metrics


class Bell:
    """Wakes the event loop from other threads, once for all that is new since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self.rung: list[asyncio.Event] = []

    def ring(self, event: asyncio.Event) -> None:
        with self.lock:
            self.rung.append(event)
            if len(self.rung) > 1 or self.loop.is_closed():
                return
        self.loop.call_soon_threadsafe(self.answer)

    def answer(self) -> None:
        with self.lock:
            rung, self.rung = self.rung, []
        for event in rung:
            event.set()


class Asked:
    """The answers of one request, in order."""

    def __init__(self, tickets: Sequence[Ticket], prompt_tokens: int, bell: Bell, metrics: Metrics) -> None:
        self.tickets, self.prompt_tokens, self.metrics = list(tickets), prompt_tokens, metrics
        self.bell, self.news, self.growing = bell, asyncio.Event(), False
        self.began = time.monotonic()
        self.times: list[list[float]] = [[] for _ in self.tickets]
        """Of each answer, when its first token and its latest were there."""
        self.counted = False
        for place, ticket in enumerate(self.tickets):
            ticket.heard = partial(self.hear, place, ticket)

    def hear(self, place: int, ticket: Ticket) -> None:
        """In the engine's thread. Who waits for whole answers is not woken for each token."""
        self.times[place][1:] = [time.monotonic()]
        if self.growing or ticket.done.is_set():
            self.bell.ring(self.news)

    async def pieces(self) -> AsyncIterator[tuple[int, list[Piece], bool]]:
        """(number of the answer, what is new, whether that is all) as the answers grow."""
        self.growing = True
        left = set(range(len(self.tickets)))
        while left:
            self.news.clear()
            for place in sorted(left):
                ticket = self.tickets[place]
                over = ticket.done.is_set()
                found = ticket.arrived()
                if over:
                    left.discard(place)
                    if ticket.error is not None:
                        raise ticket.error.with_traceback(None)
                if found or over:
                    yield place, found, over
            if left:
                await self.news.wait()
        self.count()

    async def results(self) -> list[Generation]:
        """All answers, when all are over."""
        while not all(ticket.done.is_set() for ticket in self.tickets):
            self.news.clear()
            if not all(ticket.done.is_set() for ticket in self.tickets):
                await self.news.wait()
        self.count()
        return [ticket.result(0) for ticket in self.tickets]

    def result(self, place: int) -> Generation:
        """An answer that is over."""
        return self.tickets[place].result(0)

    @property
    def generated(self) -> int:
        return sum(len(ticket.answer.tokens) for ticket in self.tickets)

    def cancel(self) -> None:
        """Nobody waits any more; what is over stays as it is."""
        for ticket in self.tickets:
            ticket.cancel()
        self.count()

    def count(self) -> None:
        """Into the metrics, once."""
        if self.counted:
            return
        self.counted = True
        self.metrics.tokens_in += self.prompt_tokens
        self.metrics.tokens_out += self.generated
        self.metrics.cancelled += sum(not ticket.done.is_set() for ticket in self.tickets)
        for ticket, times in zip(self.tickets, self.times, strict=True):
            if times:
                self.metrics.first.add(times[0] - self.began)
                steps = len(ticket.answer.tokens) - 1
                if steps > 0:
                    self.metrics.step.add((times[-1] - times[0]) / steps, steps)
