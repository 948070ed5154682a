"""Query: a changed text for a comparison, made by replacing one word or number of a text with a plausible other one."""

import re
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from cutaway.model import DecoderOnly, EncoderOnly
from cutaway.serve.inspect.inspector import Inspector, check_position
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.base import InputQuery, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.queries.model_info import MAX_CHARACTERS
from cutaway.serve.inspect.queries.text_pair import analysis_inputs

MAX_CANDIDATES = 24
MAX_INPUT_TOKENS = 256
MAX_WORDS = 12
"""The last words of a text, of which each needs a forward pass in an encoder."""
NUM_PREDICTIONS = 20
MIN_LOG_LIKELIHOOD_CHANGE = -2.0
"""A changed text of a decoder whose log-likelihood is less than that of the text by more nats is not plausible."""


class SuggestChangedText(InputQuery):
    """The plausible changed text for which the prediction at the position changes most, or None if there is none.

    `text` is the text of the input, or the source text of an encoder-decoder. In a candidate, one word is replaced by
    a word that the model predicts in its place, or one number by the next one. It has the same number of tokens, and
    the same token at the position. An untrained model predicts no plausible words, so that it has no candidates.
    """

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        check_position(self.position, self.input.tokens)
        inspector.validate_input(self.input)
        original = self.input.tokens if self.input.source is None else self.input.source
        if inspector.head is None or inspector.tokenizer.is_untrained or len(original) > MAX_INPUT_TOKENS:
            return QueryResult({"changed": None})
        clean = self._logits(inspector, self.input)
        changes: dict[str, float] = {}
        for text, model_input in islice(self._candidates(inspector, clean, job), MAX_CANDIDATES):
            job.check_cancelled()
            changed = self._logits(inspector, model_input)
            if isinstance(inspector.model, DecoderOnly):
                change = _log_likelihood(changed, model_input.tokens) - _log_likelihood(clean, self.input.tokens)
                if change < MIN_LOG_LIKELIHOOD_CHANGE:
                    continue
            distributions = [logits[self.position].softmax(-1) for logits in (clean, changed)]
            changes[text] = float((distributions[0] - distributions[1]).abs().sum())
        return QueryResult({"changed": max(changes, key=changes.__getitem__, default=None)})

    def _candidates(self, inspector: Inspector, clean: Tensor, job: QueryJob) -> Iterator[tuple[str, ModelInput]]:
        """Changed texts and their inputs; `clean` are the logits of the text, (T, V)."""
        field = "tokens" if self.input.source is None else "source"
        encode = inspector.tokenizer.encode if self.input.source is None else inspector.tokenizer.encode_source
        original: tuple[int, ...] = getattr(self.input, field)
        for match, replacement in self._replacements(inspector, clean, job):
            text = self.text[: match.start()] + replacement + self.text[match.end() :]
            token_ids = tuple(encode(text))
            model_input = self.input.model_copy(update={field: token_ids})
            is_changed = len(token_ids) == len(original) and token_ids != original
            if is_changed and model_input.tokens[self.position] == self.input.tokens[self.position]:
                yield text, model_input

    def _replacements(self, inspector: Inspector, clean: Tensor, job: QueryJob) -> Iterator[tuple[re.Match[str], str]]:
        for number in re.finditer(r"\b\d+\b", self.text):
            following = str(int(number[0]) + 1).zfill(len(number[0]))
            if len(following) == len(number[0]):
                yield number, following
        mask_name = (inspector.tokenizer.mask_token or "").strip("[]<>")
        words = [word for word in re.finditer(r"[^\W\d_]{2,}", self.text) if word[0] != mask_name]
        used = {word[0] for word in words}  # a word that occurs twice would often be wrong, as in "the dog ran ran"
        for word in reversed(words[-MAX_WORDS:]):
            job.check_cancelled()
            index = self._token_index(inspector, word)
            predictions = None if index is None else self._predict(inspector, clean, index)
            if predictions is not None and index is not None:
                form = inspector.tokenizer.decode_token(self.input.tokens[index])
                others = [inspector.tokenizer.decode_token(token) for token in predictions]
                replacements = [other.strip() for other in others if _has_same_form(form, other)]
                yield from ((word, other) for other in replacements if other not in used)

    def _token_index(self, inspector: Inspector, word: re.Match[str]) -> int | None:
        """Index of the token that is a word of the text; None if the word has several tokens."""
        tokenizer, tokens = inspector.tokenizer, self.input.tokens
        before = tokenizer.encode(self.text[: word.start()].rstrip())
        pairs = enumerate(zip(before, tokens, strict=False))
        index = next((index for index, (own, other) in pairs if own != other), min(len(before), len(tokens) - 1))
        return index if tokenizer.decode_token(tokens[index]).strip() == word[0] else None

    def _predict(self, inspector: Inspector, clean: Tensor, index: int) -> list[int] | None:
        """Most likely tokens at an index; None if the model does not predict this token."""
        logits = None
        if isinstance(inspector.model, DecoderOnly) and index > 0:
            logits = clean[index - 1]
        if isinstance(inspector.model, EncoderOnly) and (mask := inspector.tokenizer.mask_token_id) is not None:
            tokens = (*self.input.tokens[:index], mask, *self.input.tokens[index + 1 :])
            logits = self._logits(inspector, self.input.model_copy(update={"tokens": tokens}))[index]
        return None if logits is None else logits.topk(min(NUM_PREDICTIONS, len(logits))).indices.tolist()

    def _logits(self, inspector: Inspector, model_input: ModelInput) -> Tensor:
        """Logits at all positions, (T, V)."""
        with inspector.edited_model(model_input):
            return analysis_inputs(inspector, model_input).logits()


def _has_same_form(text: str, other: str) -> bool:
    """Whether two tokens are words with the same space before them and the same capitalization."""
    spaces = [len(token) - len(token.lstrip()) for token in (text, other)]
    word, other_word = text.strip(), other.strip()
    is_word = other_word.isalpha() and len(other_word) > 1
    return is_word and spaces[0] == spaces[1] and word != other_word and word.istitle() == other_word.istitle()


def _log_likelihood(logits: Tensor, tokens: tuple[int, ...]) -> float:
    """Log-likelihood of the tokens after the first one, in nats."""
    following = torch.tensor(tokens[1:], device=logits.device)
    return float(logits[:-1].log_softmax(-1).gather(-1, following[:, None]).sum())
