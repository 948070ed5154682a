"""Answers as they come: an engine driven from the terminal's own thread, with a clock beside it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cutaway.generate.api import prepare_inputs, start_engine
from cutaway.generate.engine.engine import Engine
from cutaway.generate.engine.output import Completion, CompletionChunk
from cutaway.generate.engine.request import Request
from cutaway.generate.prompts import Prompt
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.speculative.speculative_decoder import SpeculativeDecoder

if TYPE_CHECKING:
    from cutaway.families.checkpoint import Checkpoint


class TimedGeneration:
    """Requests and their engine. Whoever asks for the pieces of one lets all of them go on."""

    def __init__(self, engine: Engine | SpeculativeDecoder, requests: Sequence[Request] = ()) -> None:
        self.engine = engine
        self.requests: list[Request] = []
        self.start_times: dict[Request, float] = {}
        self.first_token_times: dict[Request, float] = {}
        self.first_token_counts: dict[Request, int] = {}
        """Tokens that were there then: guessed ahead, several come at once."""
        self.last_token_times: dict[Request, float] = {}
        self.token_counts: dict[Request, int] = {}
        for ticket in requests:
            self.add_request(ticket)
        self.num_steps = 0
        """Of the engine, since the first token."""

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, seed: int, output_prefix: Sequence[int] = ()
    ) -> Request:
        ticket = self.engine.submit(prompt, params, seed=seed, output_prefix=output_prefix)
        self.add_request(ticket)
        return ticket

    def add_request(self, request: Request) -> None:
        self.requests.append(request)
        self.start_times[request] = time.perf_counter()
        self.token_counts[request] = len(request.output_prefix)

    def stream_chunks(self, request: Request) -> Iterator[CompletionChunk]:
        """What each step adds to this answer; other answers grow meanwhile."""
        over = False
        while not over:
            over = request.finished.is_set()
            yield from request.pop_chunks()
            if not over:
                self.step()

    def step(self) -> None:
        working = self.engine.step()
        now = time.perf_counter()
        self.num_steps += bool(self.first_token_times)
        for ticket in self.requests:
            count = len(ticket.output.tokens)
            if count > self.token_counts[ticket]:
                if ticket not in self.first_token_times:
                    self.first_token_times[ticket], self.first_token_counts[ticket] = now, count
                self.last_token_times[ticket] = now
                self.token_counts[ticket] = count
        assert working or all(ticket.finished.is_set() for ticket in self.requests)

    # What the clock says

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts.values())

    def tokens_per_second(self, request: Request) -> float | None:
        """Tokens a second of one answer, without the wait for its first."""
        took = (
            self.last_token_times[request] - self.first_token_times[request]
            if request in self.first_token_times
            else 0.0
        )
        return (self.token_counts[request] - self.first_token_counts[request]) / took if took > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Seconds between the first token and the last."""
        return (
            max(self.last_token_times.values()) - min(self.first_token_times.values())
            if self.first_token_times
            else 0.0
        )

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that came in these seconds."""
        began = min(self.first_token_times.values(), default=0.0)
        return self.num_tokens - sum(
            self.first_token_counts[ticket] for ticket, at in self.first_token_times.items() if at == began
        )

    @property
    def time_to_first_token(self) -> float:
        """Seconds until the first token."""
        return (
            min(self.first_token_times[ticket] - self.start_times[ticket] for ticket in self.first_token_times)
            if self.first_token_times
            else 0.0
        )

    @property
    def mean_context_length(self) -> int:
        """Tokens of a text, in the middle of its answer, on average."""
        lengths = [len(ticket.input_ids) + self.token_counts[ticket] / 2 for ticket in self.requests]
        return max(1, round(sum(lengths) / len(lengths)))


def start_generation(
    checkpoint: "Checkpoint",
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    max_num_seqs: int | None,
    draft_model: Any = None,
    **engine_options: Any,
) -> tuple[TimedGeneration, list[Request]]:
    """An engine for these prompts, with a request for each answer, in order; as `generate` would answer them."""
    work = prepare_inputs(checkpoint, list(prompts), params, max_num_seqs=max_num_seqs, **engine_options)
    engine, tickets = start_engine(work, params, draft_model=draft_model)
    return TimedGeneration(engine, tickets), tickets


def completion_to_dict(prompt: Any, completion: Completion, tokens_per_second: float | None) -> Mapping[str, Any]:
    """An answer as data."""
    from dataclasses import asdict

    from cutaway.cli.views.terminal import json_safe

    return json_safe({"prompt": prompt, **asdict(completion), "tokens_per_second": tokens_per_second})
