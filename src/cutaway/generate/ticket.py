"""A request on its way through the engine, as the one who asked sees it."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from cutaway.errors import CutawayError
from cutaway.generate.answer import Answer, Generation, Piece
from cutaway.generate.settings import Settings


class Ticket:
    """Ask it for the pieces as they come, or for the whole answer; from any thread."""

    def __init__(self, tokens: Sequence[int], settings: Settings, seed: int, answer: Answer) -> None:
        self.tokens, self.settings, self.seed, self.answer = list(tokens), settings, seed, answer
        """`tokens` are what the decoder reads before it answers."""
        self.source: list[int] | None = None
        self.begun: list[int] = []
        """Tokens of the answer that were given, not drawn."""
        self.done = threading.Event()
        self.error: CutawayError | None = None
        self.cancelled = False
        self.heard: Callable[[], object] | None = None
        """Called by the engine's thread whenever something new is there; it must be quick, and raise nothing."""
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        # The engine's own: where the request stands.
        self.number = 0
        """In the order of arrival."""
        self.row: int | None = None
        self.pages: list[int] = []
        self.shared = 0
        """How many of the pages, the first ones, were there already."""
        self.read = 0
        """Tokens in the cache."""
        self.launched = 0
        """Tokens that were asked of the device, told or not."""

    def cancel(self) -> None:
        """Stop at the next step; what was generated until then is the answer."""
        self.cancelled = True

    def pieces(self, timeout: float | None = None) -> Iterator[Piece]:
        """What each step adds, until the answer is over; each piece once, whoever asks. `queue.Empty` if none comes."""
        while (piece := self._pieces.get(timeout=timeout)) is not None:
            yield piece
        self._pieces.put(None)  # for whoever asks again
        self._check()

    def arrived(self) -> list[Piece]:
        """The pieces that are there and nobody has had yet."""
        found = []
        while not self._pieces.empty():
            piece = self._pieces.get()
            if piece is None:
                self._pieces.put(None)
                break
            found.append(piece)
        return found

    def result(self, timeout: float | None = None) -> Generation:
        """The whole answer, when it is over."""
        if not self.done.wait(timeout):
            raise TimeoutError(f"no answer within {timeout} seconds")
        self._check()
        prompt = len(self.tokens) - len(self.begun) if self.source is None else len(self.source)
        return self.answer.result(prompt_tokens=prompt, seed=self.seed)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)  # else it would grow with each time it is raised

    @property
    def text(self) -> list[int]:
        """All tokens that are known: the prompt and the answer up to now."""
        return self.tokens + self.answer.tokens[len(self.begun) :]

    @property
    def drawn(self) -> int:
        """Tokens of the answer that the model chose and that were looked at."""
        return len(self.answer.tokens) - len(self.begun)

    def tell(self, piece: Piece) -> None:
        self._pieces.put(piece)
        if self.heard is not None:
            self.heard()

    def finish(self, reason: str | None = None, error: CutawayError | None = None) -> None:
        """Once; later calls change nothing."""
        if self.done.is_set():
            return
        if reason is not None:
            self.answer.end(reason)
            rest = self.answer.finish()
            self.answer.texts.append(rest)
            if rest:
                self.tell(Piece(rest))
        self.error = error
        self.done.set()
        self._pieces.put(None)
        if self.heard is not None:
            self.heard()
