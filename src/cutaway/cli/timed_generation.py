"""Generation with timing: runs an engine in the calling thread and measures time to first token and throughput."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

from cutaway.generate.api import prepare_inputs, start_engine
from cutaway.generate.engine.config import EngineOptions
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.output import CompletionChunk
from cutaway.generate.engine.request import Request
from cutaway.generate.prompts import Prompt
from cutaway.generate.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint


class GenerateOptions(EngineOptions, total=False):
    """Options that `cutaway generate` passes to the engine. They are documented in `cutaway.generate.generate`."""

    max_model_len: int | None
    max_num_seqs: int | None
    draft_model: "Checkpoint | str | None"


class TimedGeneration:
    """Requests of one engine, with the times of their tokens. Streaming one request advances all requests."""

    def __init__(self, engine: Engine, requests: Sequence[Request] = ()) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.token_times: dict[Request, list[tuple[float, int]]] = {}
        """(time, number of output tokens) of each request: at its submission, then after each step with new tokens."""
        for request in requests:
            self.add_request(request)
        self.num_steps = 0
        """Number of engine steps since the first token."""

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, seed: int) -> Request:
        request = self.engine.submit(prompt, params, seed=seed)
        self.add_request(request)
        return request

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        self.token_times[request] = [(time.perf_counter(), len(request.output_prefix))]

    def stream_chunks(self, request: Request) -> Iterator[CompletionChunk]:
        """Yield the chunks of one request. Each engine step advances all requests."""
        is_finished = False
        while not is_finished:
            is_finished = request.finished.is_set()
            yield from request.pop_chunks()
            if not is_finished:
                self.step()

    def step(self) -> None:
        is_working = self.engine.step()
        now = time.perf_counter()
        self.num_steps += bool(self.started_requests)
        for request in self.requests:
            if len(request.output.tokens) > self.token_times[request][-1][1]:
                self.token_times[request].append((now, len(request.output.tokens)))
        assert is_working or all(request.finished.is_set() for request in self.requests)

    # Statistics

    @property
    def started_requests(self) -> list[Request]:
        """The requests that have generated at least one token."""
        return [request for request in self.requests if len(self.token_times[request]) > 1]

    @property
    def num_tokens(self) -> int:
        return sum(times[-1][1] for times in self.token_times.values())

    def tokens_per_second(self, request: Request) -> float | None:
        """Decode throughput of one request, excluding the time to first token."""
        if request not in self.started_requests:
            return None
        _, (first_time, first_count), *_ = self.token_times[request]
        last_time, count = self.token_times[request][-1]
        return (count - first_count) / (last_time - first_time) if last_time > first_time else None

    @property
    def first_token_time(self) -> float:
        """Time (`time.perf_counter`) of the earliest generated token over all requests, or 0 if there is none."""
        return min((self.token_times[request][1][0] for request in self.started_requests), default=0.0)

    @property
    def decode_seconds(self) -> float:
        """Seconds between the earliest and the latest generated token, over all requests."""
        last_times = [self.token_times[request][-1][0] for request in self.started_requests]
        return max(last_times, default=0.0) - self.first_token_time

    @property
    def num_decoded_tokens(self) -> int:
        """Number of tokens generated within `decode_seconds`."""
        first_steps = [self.token_times[request][1] for request in self.started_requests]
        return self.num_tokens - sum(count for seconds, count in first_steps if seconds == self.first_token_time)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from submission to the first token, for the request with the shortest time."""
        times = [self.token_times[request][:2] for request in self.started_requests]
        return min((first[0] - start[0] for start, first in times), default=0.0)

    @property
    def mean_context_length(self) -> int:
        """Mean number of context tokens (prompt plus half of the completion) over the requests."""
        lengths = [len(request.input_ids) + self.token_times[request][-1][1] / 2 for request in self.requests]
        return max(1, round(sum(lengths) / len(lengths)))


def start_generation(
    checkpoint: "Checkpoint",
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    draft_model: "Checkpoint | str | None" = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    **options: Unpack[EngineOptions],
) -> tuple[TimedGeneration, list[Request]]:
    """Start an engine with one request per completion, in the order of the prompts.

    The completions are the same as those of `generate`.
    """
    inputs = prepare_inputs(
        checkpoint, list(prompts), params, max_num_seqs=max_num_seqs, max_model_len=max_model_len, **options
    )
    engine, requests = start_engine(inputs, params, draft_model=draft_model)
    return TimedGeneration(engine, requests), requests
