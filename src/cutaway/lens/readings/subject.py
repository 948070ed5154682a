"""What a reading looks at: a model with one text in front of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.equations import only_adds
from cutaway.lens.models import ours, run
from cutaway.model import EncoderDecoder, Transformer
from cutaway.model.embedding import Head
from cutaway.model.stack import Stack

Text = str | Sequence[int] | Tensor
"""A text (where there is a tokenizer) or the ids of its tokens."""
Token = int | str


@dataclass(frozen=True)
class Subject:
    """A model, its tokenizer if it has one, and one text; an encoder-decoder has a source text beside it."""

    model: Transformer
    tokenizer: Any
    tokens: Tensor
    source: Tensor | None

    @property
    def stack(self) -> Stack:
        """The stack that the text goes through, and whose stream becomes logits."""
        return self.model.stacks.get("decoder") or self.model.stacks["encoder"]

    @property
    def prefix(self) -> str:
        """What the names of that stack's sites begin with."""
        return "decoder." if len(self.model.stacks) > 1 else ""

    def need_head(self) -> Head:
        """The head, which not every encoder has."""
        head = getattr(self.model, "head", None)
        if head is None:
            raise InputError("this model has no head, so nothing in it can be read as tokens; take one with a head")
        return head

    def need_sum(self, what: str) -> None:
        """Refuse a stream that is not the sum of what was written to it."""
        for layer, block in enumerate(self.stack.blocks):
            if not only_adds(block):
                raise InputError(
                    f"block {layer} has norms on the stream itself (post-norm), so its stream is no sum of parts; "
                    f"{what} needs norms inside the branches: pre, sandwich, output or parallel placement"
                )

    @property
    def words(self) -> tuple[str, ...]:
        return self.texts(self.tokens[0].tolist())

    def texts(self, ids: list[int]) -> tuple[str, ...]:
        """Each token as text, or as its number where there is no tokenizer."""
        return tuple(text_of(self.tokenizer, token) for token in ids)

    def run(self) -> Tensor:
        """Logits (1, T, V), or the encoder's vectors where there is no head."""
        return run(self.model, self.tokens, self.source)

    def token(self, asked: Token, what: str) -> int:
        """A token's id, from itself or from a text that is one token."""
        if isinstance(asked, str):
            ids = encode(self.tokenizer, asked, what)
            if len(ids) != 1:
                raise InputError(f"{what} {asked!r} is {len(ids)} tokens, not one; a leading blank often matters")
            return ids[0]
        size = self.model.config.vocab_size
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked < size:
            raise InputError(f"{what} is {asked!r}; the vocabulary has ids 0 to {size - 1}")
        return asked

    def position(self, asked: int) -> int:
        length = self.tokens.shape[1]
        if isinstance(asked, bool) or not isinstance(asked, int) or not -length <= asked < length:
            raise InputError(f"position is {asked!r}; the text has {length} tokens, 0 to {length - 1}")
        return asked % length


def subject(model: Any, tokens: Text, source: Text | None = None) -> Subject:
    """The model of a checkpoint (or itself) and the text as a row of tokens."""
    tokenizer, inner = getattr(model, "tokenizer", None), ours(model)
    if isinstance(inner, EncoderDecoder) != (source is not None):
        need = "reads a source beside the text; pass source=…" if source is None else "reads one text, and no source"
        raise InputError(f"this model {need}")
    row = as_row("tokens", tokens, tokenizer).to(inner.device)
    beside = None if source is None else as_row("source", source, tokenizer).to(inner.device)
    return Subject(inner, tokenizer, row, beside)


def alone(model: Any) -> Subject:
    """A model without a text."""
    return Subject(ours(model), getattr(model, "tokenizer", None), torch.zeros(1, 0, dtype=torch.long), None)


def as_row(name: str, given: Text, tokenizer: Any) -> Tensor:
    if isinstance(given, str):
        given = encode(tokenizer, given, name, special=True)
    row = given if isinstance(given, Tensor) else torch.tensor(list(given), dtype=torch.long)
    row = row[None] if row.ndim == 1 else row
    if row.ndim != 2 or row.shape[0] != 1:
        raise InputError(f"{name} has shape {tuple(row.shape)}; a reading looks at one text, so give one row")
    return row


def encode(tokenizer: Any, text: str, what: str, *, special: bool = False) -> list[int]:
    if tokenizer is None:
        raise InputError(f"{what} is text, and there is no tokenizer; pass a checkpoint that has one, or token ids")
    return tokenizer.encode(text, special=special)


def text_of(tokenizer: Any, token: int) -> str:
    """A token as text; parts of a character as their bytes, and ids beyond the tokenizer's as numbers."""
    return str(token) if tokenizer is None else tokenizer.spelled(token) or str(token)


@contextmanager
def resting(model: Transformer, *, gradients: bool = False) -> Iterator[None]:
    """Without dropout, and without gradients unless they are wanted; as it was, afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            yield
    finally:
        for module in training:
            module.training = True


def wide(value: Tensor) -> Tensor:
    """In fp32 at least, as a plain tensor."""
    return value.as_subclass(Tensor).to(torch.promote_types(value.dtype, torch.float32))
