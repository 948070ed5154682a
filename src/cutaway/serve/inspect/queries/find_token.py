"""Query: the token that a typed word means."""

from typing import Annotated

from pydantic import Field

from cutaway.errors import InputError
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult


class FindToken(Query):
    """The token of a word: with a space before it if this is one token, else as typed, else the first of its tokens."""

    text: Annotated[str, Field(min_length=1, max_length=200)]

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        tokenizer = inspector.tokenizer
        variants = [tokenizer.encode_source(text, add_special_tokens=False) for text in (f" {self.text}", self.text)]
        if not any(variants):
            raise InputError(f"'{self.text}' has no tokens; type a word")
        tokens = next((tokens for tokens in variants if len(tokens) == 1), variants[0] or variants[1])
        # A tokenizer without merged spaces has the space as a token of its own.
        if len(tokens) > 1 and not tokenizer.decode_token(tokens[0]).strip():
            tokens = variants[1] or tokens
        data = {"token": tokens[0], "text": tokenizer.decode_token(tokens[0]), "num_tokens": len(tokens)}
        return QueryResult(data)
