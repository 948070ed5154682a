"""An answer while it grows: tokens become text, and text ends where its request says."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cutaway.generate.settings import Settings
from cutaway.generate.stops import StopStrings
from cutaway.text import Tokenizer


@dataclass
class Generation:
    """A finished answer."""

    tokens: list[int]
    """All that were generated, the one that ended it included."""
    text: str | None = None
    """Without the end token or stop string; None without a tokenizer."""
    finish_reason: str = "length"
    """'stop' (an end token or stop string), 'length' or 'cancelled'."""
    stop: int | str | None = None
    """The token or string that ended it."""
    prompt_tokens: int = 0
    seed: int | None = None
    score: float | None = None
    """A beam's: the sum of log-probabilities over length to the power of the length penalty."""
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


@dataclass
class Piece:
    """What one step adds to an answer; several tokens may pass before text is certain."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


class Answer:
    """Takes tokens one by one, gives text as it becomes certain, and says when it is over."""

    def __init__(
        self,
        settings: Settings,
        limit: int,
        tokenizer: Tokenizer | None,
        eos: Iterable[int] = (),
        after: Sequence[int] = (),
    ) -> None:
        """`limit`: tokens at most. `after`: the text that the answer continues."""
        self.limit = limit
        self.ends = {*settings.stop_tokens, *(() if settings.ignore_eos else eos)}
        self.stream = None if tokenizer is None else tokenizer.stream(after=after)
        self.stops = StopStrings(settings.stop) if settings.stop and tokenizer is not None else None
        self.wants = settings.logprobs
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self.top: list[dict[int, float]] = []
        self.reason: str | None = None
        self.stop: int | str | None = None

    def take(
        self, token: int, logprob: float | None = None, top: dict[int, float] | None = None, *, cut: bool = False
    ) -> Piece:
        """One more token; what it adds to the text that may be shown. `cut`: it was put there to end the text."""
        self.tokens.append(token)
        piece = Piece(tokens=[token])
        if self.wants is not None and logprob is not None:
            self.logprobs.append(logprob)
            piece.logprobs = [logprob]
            if top is not None:
                self.top.append(top)
                piece.top_logprobs = [top]
        if cut:
            self.end("length")
        elif token in self.ends:
            self.end("stop", token)
        elif self.stream is not None:
            piece.text = self.show(self.stream.push(token))
        if self.reason is None and len(self.tokens) >= self.limit:
            self.end("length")
        if self.reason is not None:
            piece.text += self.finish()
        self.texts.append(piece.text)
        return piece

    def show(self, text: str) -> str:
        """The part of new text that no stop string can take back; ends the answer if one is found."""
        if self.stops is None or not text:
            return text
        shown = self.stops.feed(text)
        if self.stops.found is not None:
            self.end("stop", self.stops.found)
        return shown

    def end(self, reason: str, stop: int | str | None = None) -> None:
        if self.reason is None:
            self.reason, self.stop = reason, stop

    def finish(self) -> str:
        """The text that was held back until the end."""
        if self.stream is None:
            return ""
        if isinstance(self.stop, str):
            return ""
        rest = self.show(self.stream.finish())
        return rest if self.stops is None or isinstance(self.stop, str) else rest + self.stops.flush()

    def result(self, *, prompt_tokens: int, seed: int | None) -> Generation:
        return Generation(
            tokens=self.tokens,
            text=None if self.stream is None else "".join(self.texts),
            finish_reason=self.reason or "cancelled",
            stop=self.stop,
            prompt_tokens=prompt_tokens,
            seed=seed,
            logprobs=None if self.wants is None else self.logprobs,
            top_logprobs=self.top or None,
        )
