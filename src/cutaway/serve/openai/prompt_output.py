"""The prompt in the response: `echo` of /v1/completions with log-probabilities, and `prompt_logprobs` as in vLLM."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from cutaway.generate import Request
from cutaway.generate.sampling.prompt_logprobs import PromptLogprob
from cutaway.serve.openai.token_decoder import TokenDecoder
from cutaway.tokenizer import Tokenizer

Data = dict[str, object]
MIN_LOGPROB = -9999.0
"""Smallest log-probability of a response, because JSON has no infinity."""


@dataclass
class PromptOutput:
    """Adds prompts to the choices of a response. `prompts` are those of the request, each with `n` choices."""

    prompts: Sequence[str | list[int]]
    n: int
    tokenizer: Tokenizer | None
    token_decoder: TokenDecoder | None
    echo: bool
    num_logprobs: int | None
    """Number of alternatives per token of the echoed prompt, or None without log-probabilities."""
    num_prompt_logprobs: int | None
    """`prompt_logprobs` of the request."""
    without_completion: bool
    """If True (`max_tokens: 0`), the choices have only the prompt. One token is generated nevertheless."""

    def text(self, choice_index: int) -> str:
        """Text that precedes the completion in the choice."""
        prompt = self.prompts[choice_index // self.n]
        if not self.echo or (not isinstance(prompt, str) and self.tokenizer is None):
            return ""
        if isinstance(prompt, str):
            return prompt
        assert self.tokenizer is not None
        return self.tokenizer.decode(prompt, skip_special_tokens=False)

    def add_to_choice(self, choice: Data, index: int, request: Request) -> None:
        """Put the prompt before the completion of a choice, and its log-probabilities before those of its tokens."""
        if self.without_completion:
            choice |= {"text": "", "logprobs": None, "finish_reason": "length"}
        if self.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.build_prompt_logprobs(request)
        if not self.echo:
            return
        text = self.text(index)
        choice["text"] = f"{text}{choice['text']}"
        prompt_logprobs, logprobs = self.build_logprobs(index, request), choice["logprobs"]
        if prompt_logprobs is None:
            return
        if isinstance(logprobs, dict):
            offsets = [len(text) + offset for offset in logprobs["text_offset"]]
            for name, values in (logprobs | {"text_offset": offsets}).items():
                head = prompt_logprobs[name]
                prompt_logprobs[name] = None if head is None or values is None else [*head, *values]
        choice["logprobs"] = prompt_logprobs

    def build_logprobs(self, index: int, request: Request) -> dict[str, list[object] | None] | None:
        """Log-probabilities of the tokens of an echoed prompt. The first token has none, as in the OpenAI API."""
        if self.num_logprobs is None:
            return None
        tokens, known = request.input_ids, request.output.prompt_logprobs or []
        alternatives: list[object] | None = None
        if self.num_logprobs:
            alternatives = [
                None
                if each is None
                else logprobs_by_text(
                    self.token_text, dict(islice(each.top_logprobs.items(), self.num_logprobs)), token, each.logprob
                )
                for token, each in zip(tokens, known, strict=True)
            ]
        return {
            "tokens": [self.token_text(token) for token in tokens],
            "token_logprobs": [None if each is None else max(each.logprob, MIN_LOGPROB) for each in known],
            "top_logprobs": alternatives,
            "text_offset": [*self._text_offsets(tokens, self.text(index))],
        }

    def build_prompt_logprobs(self, request: Request) -> list[Data | None]:
        """For each token of the prompt, its log-probability and those of the most likely tokens, by token id."""
        num_top = self.num_prompt_logprobs or 0
        return [
            None if each is None else self._entries(token, each, num_top)
            for token, each in zip(request.input_ids, request.output.prompt_logprobs or [], strict=True)
        ]

    def _entries(self, token: int, known: PromptLogprob, num_top: int) -> Data:
        top = islice(known.top_logprobs.items(), num_top)
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(top, 1)}
        ranked[token] = known.logprob, known.rank
        return {
            str(other): {"logprob": max(value, MIN_LOGPROB), "rank": rank, "decoded_token": self.token_text(other)}
            for other, (value, rank) in ranked.items()
        }

    def token_text(self, token: int) -> str:
        return f"token_id:{token}" if self.token_decoder is None else self.token_decoder.token_text(token)

    def _text_offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Index in `text` of the first character of each token.

        A token that the template of the tokenizer adds, such as BOS, is not in a text of the request: it has the offset
        of the next token."""
        if self.token_decoder is None or self.tokenizer is None:
            return [0] * len(tokens)
        data, position, num_chars, offsets = text.encode(), 0, 0, []
        for token in tokens:
            token_bytes = self.token_decoder.token_bytes(token)
            if not data.startswith(token_bytes, position) and data.startswith(token_bytes.lstrip(b" "), position):
                token_bytes = token_bytes.lstrip(b" ")  # the space that SentencePiece puts before a text
            is_added = token in self.tokenizer.all_special_ids and not data.startswith(token_bytes, position)
            size = 0 if is_added else len(token_bytes)
            piece = data[position : position + size]
            is_inside_char = bool(piece) and piece[0] & 0xC0 == 0x80
            offsets.append(num_chars - is_inside_char)
            num_chars += sum(byte & 0xC0 != 0x80 for byte in piece)
            position += len(piece)
        return offsets


def logprobs_by_text(
    token_text: Callable[[int], str], top: Mapping[int, float], token: int, logprob: float
) -> dict[str, float]:
    """Log-probabilities of a token and of the most likely tokens, by their texts.

    The key of a token whose text is that of another one is `token_id:` and its id."""
    result = {token_text(token): max(logprob, MIN_LOGPROB)}
    for other, value in top.items():
        if other != token:
            text = token_text(other)
            result[f"token_id:{other}" if text in result else text] = max(value, MIN_LOGPROB)
    return result
