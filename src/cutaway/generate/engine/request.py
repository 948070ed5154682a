"""Request: the handle that `Engine.submit` returns, with the request's output and its state in the scheduler."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from cutaway.errors import CutawayError
from cutaway.generate.engine.output import Completion, CompletionChunk, OutputProcessor
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.generate.structured_output.grammar import Grammar


class RequestGroup:
    """The completions that one API request asks for. They take turns with those of other groups: see `RequestQueue`."""

    def __init__(self, client: str = "", max_seqs: int | None = None) -> None:
        """`client`: name that all groups of a client have. `max_seqs`: maximum number of rows; default all."""
        self.client, self.max_seqs = client, max_seqs
        self.prefill_turn = 0
        """Number of the prefill step in which a request of this group was last prefilled."""


class Request:
    """One completion to generate. `stream`, `result` and `abort` may be called from any thread."""

    def __init__(
        self, input_ids: Sequence[int], sampling_params: SamplingParams, seed: int, output: OutputProcessor
    ) -> None:
        self.input_ids, self.sampling_params, self.seed, self.output = list(input_ids), sampling_params, seed, output
        """`input_ids`: decoder tokens before the first sampled token."""
        self.source_tokens: list[int] | None = None
        self.adapter: str | None = None
        """Name of the adapter of the model. None: the base model."""
        self.output_prefix: list[int] = []
        """First tokens of the completion, which are forced and not sampled."""
        self.grammar: Grammar | None = None
        """Grammar that restricts the sampled tokens."""
        self.finished = threading.Event()
        self.error: CutawayError | None = None
        self.aborted = False
        self.on_update: Callable[[], object] | None = None
        """Called in the engine's thread after each new chunk and at the end; it must return fast and not raise."""
        self._chunks: queue.SimpleQueue[CompletionChunk | None] = queue.SimpleQueue()
        self.group = RequestGroup()
        self.priority = 0
        """Smaller values are admitted earlier, with the scheduling policy 'priority'."""
        # State of the engine and the scheduler.
        self.arrival_index = 0
        """Position in the order of arrival."""
        self.arrival_step = 0
        """Number of the engine's step at the arrival."""
        self.num_preemptions = 0
        self.row: int | None = None
        """Row of the KV cache; None while the request waits and after it has finished."""
        self.page_ids: list[int] = []
        self.num_computed_tokens = 0
        """Number of tokens in the KV cache."""
        self.num_launched_tokens = 0
        """Number of completion tokens whose decode step was launched, including those not yet copied to the host."""

    def abort(self) -> None:
        """Stop the request before the next step. The tokens generated so far become the completion."""
        self.aborted = True

    def stream(self, timeout: float | None = None) -> Iterator[CompletionChunk]:
        """Yield chunks until the request is finished. Each chunk is yielded once, even if several callers stream.

        `queue.Empty` is raised if no chunk arrives within `timeout` seconds. If the request failed, its error is raised
        after the last chunk.
        """
        while (chunk := self._chunks.get(timeout=timeout)) is not None:
            yield chunk
        self._chunks.put(None)  # so that another call to stream ends too
        self._raise_error()

    def pop_chunks(self) -> list[CompletionChunk]:
        """Return and remove the chunks that are available now, without waiting."""
        chunks = []
        while not self._chunks.empty():
            chunk = self._chunks.get()
            if chunk is None:
                self._chunks.put(None)
                break
            chunks.append(chunk)
        return chunks

    def result(self, timeout: float | None = None) -> Completion:
        """Wait until the request is finished and return its completion; raise its error if it failed.

        TimeoutError is raised if the request does not finish within `timeout` seconds."""
        if not self.finished.wait(timeout):
            raise TimeoutError(f"the request did not finish within {timeout} seconds")
        self._raise_error()
        prompt = self.input_ids if self.source_tokens is None else self.source_tokens
        prompt_tokens = len(prompt) - (len(self.output_prefix) if self.source_tokens is None else 0)
        return self.output.to_completion(prompt_tokens=prompt_tokens, seed=self.seed)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # otherwise the traceback grows with each raise

    @property
    def can_use_prefix_cache(self) -> bool:
        """Whether keys and values of the first tokens may come from the prefix cache.

        Log-probabilities of the prompt need the hidden states of all its tokens, until they are computed."""
        known = self.output.prompt_logprobs
        return self.source_tokens is None and (known is None or len(known) == len(self.input_ids))

    @property
    def all_token_ids(self) -> list[int]:
        """Decoder tokens so far: `input_ids`, then the sampled tokens of the completion."""
        return self.input_ids + self.output.tokens[len(self.output_prefix) :]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens of the completion that are on the host."""
        return len(self.output.tokens) - len(self.output_prefix)

    def add_chunk(self, chunk: CompletionChunk) -> None:
        self._chunks.put(chunk)
        if self.on_update is not None:
            self.on_update()

    def finish(self, finish_reason: str | None = None, error: CutawayError | None = None) -> None:
        """Mark the request as finished, set its finish reason or error, and wake the threads that wait for it.

        Later calls have no effect."""
        if self.finished.is_set():
            return
        if finish_reason is not None:
            self.output.set_finish_reason(finish_reason)
            rest = self.output.flush()
            self.output.text_chunks.append(rest)
            if rest:
                self.add_chunk(CompletionChunk(rest))
        self.error = error
        self.finished.set()
        self._chunks.put(None)
        if self.on_update is not None:
            self.on_update()
