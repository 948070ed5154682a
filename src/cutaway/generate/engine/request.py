"""A request on its way through the engine, as the one who asked sees it."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from cutaway.errors import CutawayError
from cutaway.generate.engine.output import Completion, CompletionChunk, OutputProcessor
from cutaway.generate.sampling.sampling_params import SamplingParams


class Request:
    """Ask it for the pieces as they come, or for the whole answer; from any thread."""

    def __init__(
        self, input_ids: Sequence[int], sampling_params: SamplingParams, seed: int, output: OutputProcessor
    ) -> None:
        self.input_ids, self.sampling_params, self.seed, self.output = list(input_ids), sampling_params, seed, output
        """`input_ids` are what the decoder reads before it answers."""
        self.source_tokens: list[int] | None = None
        self.output_prefix: list[int] = []
        """Tokens of the answer that were given, not drawn."""
        self.finished = threading.Event()
        self.error: CutawayError | None = None
        self.aborted = False
        self.on_update: Callable[[], object] | None = None
        """Called by the engine's thread whenever something new is there; it must be quick, and raise nothing."""
        self._chunks: queue.SimpleQueue[CompletionChunk | None] = queue.SimpleQueue()
        # The engine's own: where the request stands.
        self.arrival_index = 0
        """In the order of arrival."""
        self.row: int | None = None
        self.page_ids: list[int] = []
        self.num_shared_pages = 0
        """How many of the pages, the first ones, were there already."""
        self.num_computed_tokens = 0
        """Tokens in the cache."""
        self.num_launched_tokens = 0
        """Tokens that were asked of the device, told or not."""

    def abort(self) -> None:
        """Stop at the next step; what was generated until then is the answer."""
        self.aborted = True

    def stream(self, timeout: float | None = None) -> Iterator[CompletionChunk]:
        """What each step adds, until the answer is over; each piece once, whoever asks. `queue.Empty` if none comes."""
        while (piece := self._chunks.get(timeout=timeout)) is not None:
            yield piece
        self._chunks.put(None)  # for whoever asks again
        self._raise_error()

    def pop_chunks(self) -> list[CompletionChunk]:
        """The pieces that are there and nobody has had yet."""
        found = []
        while not self._chunks.empty():
            piece = self._chunks.get()
            if piece is None:
                self._chunks.put(None)
                break
            found.append(piece)
        return found

    def result(self, timeout: float | None = None) -> Completion:
        """The whole answer, when it is over."""
        if not self.finished.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} seconds")
        self._raise_error()
        prompt = (
            len(self.input_ids) - len(self.output_prefix) if self.source_tokens is None else len(self.source_tokens)
        )
        return self.output.to_completion(prompt_tokens=prompt, seed=self.seed)

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # else it would grow with each time it is raised

    @property
    def all_token_ids(self) -> list[int]:
        """All tokens that are known: the prompt and the answer up to now."""
        return self.input_ids + self.output.tokens[len(self.output_prefix) :]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the answer that the model chose and that were looked at."""
        return len(self.output.tokens) - len(self.output_prefix)

    def add_chunk(self, chunk: CompletionChunk) -> None:
        self._chunks.put(chunk)
        if self.on_update is not None:
            self.on_update()

    def finish(self, finish_reason: str | None = None, error: CutawayError | None = None) -> None:
        """Once; later calls change nothing."""
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
