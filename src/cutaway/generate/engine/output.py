"""Completions: incremental detokenization, stop tokens, stop strings and log-probabilities of one request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cutaway.generate.engine.stop_strings import StopStrings
from cutaway.generate.sampling.prompt_logprobs import PromptLogprob
from cutaway.generate.sampling.sampling_params import SamplingParams
from cutaway.tokenizer import DecodeStream, Tokenizer
from cutaway.tokenizer.token_bytes import BytesDecodeStream, token_bytes


@dataclass
class Completion:
    """The output of one request: the generated tokens, their text, and why generation ended."""

    tokens: list[int]
    """All generated tokens, including the stop token."""
    text: str | None = None
    """Text without the stop token or stop string; None without a tokenizer."""
    finish_reason: str = "length"
    """'stop' (stop token or stop string), 'length' or 'abort'."""
    stop_reason: int | str | None = None
    """The stop token id or the stop string that ended the completion; None if neither did."""
    prompt_tokens: int = 0
    seed: int | None = None
    score: float | None = None
    """Beam search score: sum of log-probabilities / length ** length_penalty."""
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """For each token of the prompt, its log-probability. None for the first token, which nothing precedes."""


@dataclass
class CompletionChunk:
    """New tokens of a completion and the new text. The text may be empty: characters and stop strings can span several
    tokens."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


class OutputProcessor:
    """Converts the sampled tokens of one request to text incrementally and sets its finish reason."""

    def __init__(
        self,
        sampling_params: SamplingParams,
        max_tokens: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int] = (),
        prompt_tokens: Sequence[int] = (),
    ) -> None:
        """`max_tokens`: maximum number of completion tokens.

        `prompt_tokens`: tokens before the completion, on which the text of its first tokens may depend."""
        self.max_tokens = max_tokens
        self.stop_token_ids = sampling_params.all_stop_token_ids(eos_token_ids)
        self.detokenizer: DecodeStream | BytesDecodeStream | None = None
        if tokenizer is not None and sampling_params.constraint is not None:
            self.detokenizer = BytesDecodeStream(token_bytes(tokenizer))
        elif tokenizer is not None:
            self.detokenizer = tokenizer.decode_stream(prefix_ids=prompt_tokens)
        has_stop_strings = sampling_params.stop and tokenizer is not None
        self.stop_strings = StopStrings(sampling_params.stop) if has_stop_strings else None
        self.num_logprobs = sampling_params.logprobs
        self.tokens: list[int] = []
        self.text_chunks: list[str] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[PromptLogprob | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def append_token(
        self,
        token: int,
        logprob: float | None = None,
        top_logprobs: dict[int, float] | None = None,
        *,
        forced_eos: bool = False,
        completes_grammar: bool = False,
    ) -> CompletionChunk:
        """Append a token and return it with the text that can be shown now. Sets the finish reason at a stop condition.

        `forced_eos`: the token was not sampled but forced, because the completion reached its maximum length.
        `completes_grammar`: with this token the completion matches its grammar, which allows no further text."""
        self.tokens.append(token)
        chunk = CompletionChunk(tokens=[token])
        if self.num_logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
            chunk.logprobs = [logprob]
            if top_logprobs is not None:
                self.top_logprobs.append(top_logprobs)
                chunk.top_logprobs = [top_logprobs]
        if forced_eos:
            self.set_finish_reason("length")
        elif token in self.stop_token_ids:
            self.set_finish_reason("stop", token)
        elif self.detokenizer is not None:
            chunk.text = self._check_stop_strings(self.detokenizer.push(token))
        if completes_grammar:
            self.set_finish_reason("stop")
        if self.finish_reason is None and len(self.tokens) >= self.max_tokens:
            self.set_finish_reason("length")
        if self.finish_reason is not None:
            chunk.text += self.flush()
        self.text_chunks.append(chunk.text)
        return chunk

    def _check_stop_strings(self, text: str) -> str:
        """Return the text that cannot belong to a stop string; set the finish reason if a stop string is complete."""
        if self.stop_strings is None or not text:
            return text
        released = self.stop_strings.feed(text)
        if self.stop_strings.found is not None:
            self.set_finish_reason("stop", self.stop_strings.found)
        return released

    def set_finish_reason(self, finish_reason: str, stop_reason: int | str | None = None) -> None:
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = finish_reason, stop_reason

    def flush(self) -> str:
        """Return the text held back by the detokenizer and by partial stop strings."""
        if self.detokenizer is None or isinstance(self.stop_reason, str):
            return ""
        rest = self._check_stop_strings(self.detokenizer.finish())
        if self.stop_strings is not None and not isinstance(self.stop_reason, str):
            rest += self.stop_strings.flush()
        return rest

    def to_completion(self, *, prompt_tokens: int, seed: int | None) -> Completion:
        return Completion(
            tokens=self.tokens,
            text=None if self.detokenizer is None else "".join(self.text_chunks),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            prompt_tokens=prompt_tokens,
            seed=seed,
            logprobs=None if self.num_logprobs is None else self.logprobs,
            top_logprobs=self.top_logprobs or None,
            prompt_logprobs=self.prompt_logprobs,
        )
