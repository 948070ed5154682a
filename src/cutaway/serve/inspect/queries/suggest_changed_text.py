"""Query: a changed text for a comparison, made by replacing one word of a text with another word of it."""

import re
from collections.abc import Iterator
from itertools import permutations
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from cutaway.serve.inspect.inspector import Inspector, check_position
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.base import InputQuery, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.queries.model_info import MAX_CHARACTERS
from cutaway.serve.inspect.queries.text_pair import analysis_inputs

MAX_CANDIDATES = 24
MAX_INPUT_TOKENS = 256


class SuggestChangedText(InputQuery):
    """The changed text for which the answer at the position changes most, or None if there is no candidate.

    `text` is the text of the input, or the source text of an encoder-decoder. A candidate has one word replaced by
    another word of the text, the same number of tokens, and the same token at the position.
    """

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        check_position(self.position, self.input.tokens)
        inspector.validate_input(self.input)
        candidates = dict(self._candidates(inspector))
        if inspector.head is None or not candidates:
            return QueryResult({"changed": next(iter(candidates), None)})
        clean = self._logits(inspector, self.input)
        changes: dict[str, float] = {}
        for text, model_input in candidates.items():
            job.check_cancelled()
            changes[text] = _answer_change(clean, self._logits(inspector, model_input))
        return QueryResult({"changed": max(changes, key=changes.__getitem__)})

    def _candidates(self, inspector: Inspector) -> Iterator[tuple[str, ModelInput]]:
        tokenizer, field = inspector.tokenizer, "tokens" if self.input.source is None else "source"
        encode = tokenizer.encode if self.input.source is None else tokenizer.encode_source
        original = getattr(self.input, field)
        if len(original) > MAX_INPUT_TOKENS:
            return
        mask_name = (tokenizer.mask_token or "").strip("[]<>")
        words = [word for word in re.finditer(r"\w+", self.text) if word[0] != mask_name]
        num_candidates = 0
        for word, other in permutations(words, 2):
            text = self.text[: word.start()] + other[0] + self.text[word.end() :]
            token_ids = tuple(encode(text))
            model_input = self.input.model_copy(update={field: token_ids})
            is_changed = len(token_ids) == len(original) and token_ids != original
            if is_changed and model_input.tokens[self.position] == self.input.tokens[self.position]:
                yield text, model_input
                num_candidates += 1
                if num_candidates == MAX_CANDIDATES:
                    return

    def _logits(self, inspector: Inspector, model_input: ModelInput) -> Tensor:
        with inspector.edited_model(model_input):
            return analysis_inputs(inspector, model_input).logits_at(self.position)[0]


def _answer_change(clean: Tensor, changed: Tensor) -> float:
    """Change of the logit difference between the two answers; 0 if the answers are the same."""
    answers = torch.stack([clean.argmax(), changed.argmax()])
    differences = [float(logits[answers[0]] - logits[answers[1]]) for logits in (clean, changed)]
    return differences[0] - differences[1]
