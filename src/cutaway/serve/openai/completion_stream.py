"""Completions of one HTTP request as async streams. The engine's thread notifies the event loop of new tokens."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from cutaway.generate import Completion, CompletionChunk, Request
from cutaway.serve.metrics import ModelMetrics
from cutaway.serve.request_context import RequestContext


class EventLoopNotifier:
    """Sets asyncio events from other threads. One wake-up of the event loop sets all events that are pending."""

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
            events, self._pending = self._pending, []
        for event in events:
            event.set()


class CompletionStream:
    """The completions of one HTTP request, ordered by prompt, with n completions per prompt."""

    def __init__(
        self,
        requests: Sequence[Request],
        num_prompt_tokens: int,
        notifier: EventLoopNotifier,
        metrics: ModelMetrics,
        context: RequestContext,
    ) -> None:
        self.requests, self.num_prompt_tokens = list(requests), num_prompt_tokens
        self.metrics, self.context = metrics, context
        self.notifier, self.new_output, self.is_streaming = notifier, asyncio.Event(), False
        self.start_time = time.monotonic()
        self.token_times: list[list[float]] = [[] for _ in self.requests]
        """For each completion, the times of the first and of the latest token."""
        self.metrics_recorded = False
        for index, request in enumerate(self.requests):
            request.on_update = partial(self.on_output, index, request)

    def on_output(self, index: int, request: Request) -> None:
        """Record the time of a completion's new token. This is called by the engine's thread.

        When streaming, the event loop is notified of each token, otherwise only when the completion is finished.
        """
        self.token_times[index][1:] = [time.monotonic()]
        if self.is_streaming or request.finished.is_set():
            self.notifier.notify(self.new_output)

    async def stream_chunks(self) -> AsyncIterator[tuple[int, list[CompletionChunk], bool]]:
        """Yield (index of the completion, new chunks, is_finished) as tokens are generated."""
        self.is_streaming = True
        unfinished = set(range(len(self.requests)))
        while unfinished:
            self.new_output.clear()
            for index in sorted(unfinished):
                request = self.requests[index]
                is_finished = request.finished.is_set()
                chunks = request.pop_chunks()
                if is_finished:
                    unfinished.discard(index)
                    if request.error is not None:
                        raise request.error.with_traceback(None)
                if chunks or is_finished:
                    yield index, chunks, is_finished
            if unfinished:
                await self.new_output.wait()
        self.record_metrics()

    async def wait_results(self) -> list[Completion]:
        """Wait until all completions are finished and return them."""
        while not all(request.finished.is_set() for request in self.requests):
            self.new_output.clear()
            if not all(request.finished.is_set() for request in self.requests):
                await self.new_output.wait()
        self.record_metrics()
        return [request.result(0) for request in self.requests]

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(request.output.tokens) for request in self.requests)

    def abort(self) -> None:
        """Abort the unfinished completions of the request, and record the metrics."""
        for request in self.requests:
            request.abort()
        self.record_metrics()

    def record_metrics(self) -> None:
        """Add token counts and latencies to the metrics and to the HTTP request. Only the first call has an effect."""
        if self.metrics_recorded:
            return
        self.metrics_recorded = True
        metrics, context = self.metrics, self.context
        metrics.prompt_tokens.inc(self.num_prompt_tokens)
        metrics.generation_tokens.inc(self.num_generated_tokens)
        context.add_tokens(self.num_prompt_tokens, self.num_generated_tokens)
        first_token_times = [times[0] for times in self.token_times if times]
        if first_token_times:
            context.time_to_first_token = min(first_token_times) - context.start_time
        for request, times in zip(self.requests, self.token_times, strict=True):
            if not request.finished.is_set():
                metrics.aborted_requests.inc()
                context.finish_reasons.append("abort")
                continue
            finish_reason = "error" if request.error is not None else request.output.finish_reason or "abort"
            metrics.record_finished(finish_reason)
            context.finish_reasons.append(finish_reason)
            num_generated = len(request.output.tokens)
            metrics.request_prompt_tokens.observe(len(request.source_tokens or request.input_ids))
            metrics.request_generation_tokens.observe(num_generated)
            if times:
                metrics.time_to_first_token.observe(times[0] - self.start_time)
                metrics.e2e_request_latency.observe(times[-1] - self.start_time)
                if num_generated > 1:
                    metrics.time_per_output_token.observe((times[-1] - times[0]) / (num_generated - 1))
