"""Answers on their way, as the event loop sees them: the engine works in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from cutaway.generate import Completion, CompletionChunk, Request
from cutaway.serve.metrics import ServerMetrics


class EventLoopNotifier:
    """Wakes the event loop from other threads, once for all that is new since it last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self._pending: list[asyncio.Event] = []

    def notify(self, event: asyncio.Event) -> None:
        with self.lock:
            self._pending.append(event)
            if len(self._pending) > 1 or self.loop.is_closed():
                return
        self.loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        with self.lock:
            rung, self._pending = self._pending, []
        for event in rung:
            event.set()


class CompletionStream:
    """The answers of one request, in order."""

    def __init__(
        self, requests: Sequence[Request], num_prompt_tokens: int, notifier: EventLoopNotifier, metrics: ServerMetrics
    ) -> None:
        self.requests, self.num_prompt_tokens, self.metrics = list(requests), num_prompt_tokens, metrics
        self.notifier, self.new_output, self.is_streaming = notifier, asyncio.Event(), False
        self.start_time = time.monotonic()
        self.token_times: list[list[float]] = [[] for _ in self.requests]
        """Of each answer, when its first token and its latest were there."""
        self.metrics_recorded = False
        for place, ticket in enumerate(self.requests):
            ticket.on_update = partial(self.on_output, place, ticket)

    def on_output(self, index: int, request: Request) -> None:
        """In the engine's thread. Who waits for whole answers is not woken for each token."""
        self.token_times[index][1:] = [time.monotonic()]
        if self.is_streaming or request.finished.is_set():
            self.notifier.notify(self.new_output)

    async def stream_chunks(self) -> AsyncIterator[tuple[int, list[CompletionChunk], bool]]:
        """(number of the answer, what is new, whether that is all) as the answers grow."""
        self.is_streaming = True
        left = set(range(len(self.requests)))
        while left:
            self.new_output.clear()
            for place in sorted(left):
                ticket = self.requests[place]
                over = ticket.finished.is_set()
                found = ticket.pop_chunks()
                if over:
                    left.discard(place)
                    if ticket.error is not None:
                        raise ticket.error.with_traceback(None)
                if found or over:
                    yield place, found, over
            if left:
                await self.new_output.wait()
        self.record_metrics()

    async def wait_results(self) -> list[Completion]:
        """All answers, when all are over."""
        while not all(ticket.finished.is_set() for ticket in self.requests):
            self.new_output.clear()
            if not all(ticket.finished.is_set() for ticket in self.requests):
                await self.new_output.wait()
        self.record_metrics()
        return [ticket.result(0) for ticket in self.requests]

    def get_result(self, index: int) -> Completion:
        """An answer that is over."""
        return self.requests[index].result(0)

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(ticket.output.tokens) for ticket in self.requests)

    def abort(self) -> None:
        """Nobody waits any more; what is over stays as it is."""
        for ticket in self.requests:
            ticket.abort()
        self.record_metrics()

    def record_metrics(self) -> None:
        """Into the metrics, once."""
        if self.metrics_recorded:
            return
        self.metrics_recorded = True
        self.metrics.prompt_tokens += self.num_prompt_tokens
        self.metrics.generation_tokens += self.num_generated_tokens
        self.metrics.aborted_requests += sum(not ticket.finished.is_set() for ticket in self.requests)
        for ticket, times in zip(self.requests, self.token_times, strict=True):
            if times:
                self.metrics.time_to_first_token.observe(times[0] - self.start_time)
                steps = len(ticket.output.tokens) - 1
                if steps > 0:
                    self.metrics.inter_token_latency.observe((times[-1] - times[0]) / steps, steps)
