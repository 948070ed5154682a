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
        self.start_times: dict[Request, float] = {}
        self.first_token_times: dict[Request, float] = {}
        self.first_token_counts: dict[Request, int] = {}
        """Number of tokens at the time of the first token. With speculative decoding it may be more than one."""
        self.last_token_times: dict[Request, float] = {}
        self.token_counts: dict[Request, int] = {}
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
        self.start_times[request] = time.perf_counter()
        self.token_counts[request] = len(request.output_prefix)

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
        self.num_steps += bool(self.first_token_times)
        for request in self.requests:
            count = len(request.output.tokens)
            if count > self.token_counts[request]:
                if request not in self.first_token_times:
                    self.first_token_times[request], self.first_token_counts[request] = now, count
                self.last_token_times[request] = now
                self.token_counts[request] = count
        assert is_working or all(request.finished.is_set() for request in self.requests)

    # Statistics

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts.values())

    def tokens_per_second(self, request: Request) -> float | None:
        """Decode throughput of one request, excluding the time to first token."""
        if request not in self.first_token_times:
            return None
        seconds = self.last_token_times[request] - self.first_token_times[request]
        return (self.token_counts[request] - self.first_token_counts[request]) / seconds if seconds > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Seconds between the earliest and the latest generated token, over all requests."""
        return max(self.last_token_times.values(), default=0.0) - min(self.first_token_times.values(), default=0.0)

    @property
    def num_decoded_tokens(self) -> int:
        """Number of tokens generated within `decode_seconds`."""
        first_time = min(self.first_token_times.values(), default=0.0)
        first_requests = [request for request, seconds in self.first_token_times.items() if seconds == first_time]
        return self.num_tokens - sum(self.first_token_counts[request] for request in first_requests)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from submission to the first token, for the request with the shortest time."""
        return min((end - self.start_times[request] for request, end in self.first_token_times.items()), default=0.0)

    @property
    def mean_context_length(self) -> int:
        """Mean number of context tokens (prompt plus half of the completion) over the requests."""
        lengths = [len(request.input_ids) + self.token_counts[request] / 2 for request in self.requests]
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
