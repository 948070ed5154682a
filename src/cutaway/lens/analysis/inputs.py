"""What an analysis looks at: a model with one text in front of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.adapters import require_cutaway_model, run_model
from cutaway.lens.sites import has_additive_residual
from cutaway.model import EncoderDecoder, Transformer
from cutaway.model.head import LMHead
from cutaway.model.stack import Stack

TextOrTokens = str | Sequence[int] | Tensor
"""A text (where there is a tokenizer) or the ids of its tokens."""
TokenOrId = int | str


@dataclass(frozen=True)
class AnalysisInputs:
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
    def site_prefix(self) -> str:
        """What the names of that stack's sites begin with."""
        return "decoder." if len(self.model.stacks) > 1 else ""

    def require_head(self) -> LMHead:
        """The head, which not every encoder has."""
        head = getattr(self.model, "head", None)
        if head is None:
            raise InputError("this model has no head, so nothing in it can be read as tokens; take one with a head")
        return head

    def require_additive_residual(self, analysis: str) -> None:
        """Refuse a stream that is not the sum of what was written to it."""
        for layer, block in enumerate(self.stack.blocks):
            if not has_additive_residual(block):
                raise InputError(
                    f"block {layer} has norms on the stream itself (post-norm), so its stream is no sum of parts; "
                    f"{analysis} needs norms inside the branches: pre, sandwich, output or parallel placement"
                )

    @property
    def token_labels(self) -> tuple[str, ...]:
        return self.decode_tokens(self.tokens[0].tolist())

    def decode_tokens(self, ids: list[int]) -> tuple[str, ...]:
        """Each token as text, or as its number where there is no tokenizer."""
        return tuple(token_text(self.tokenizer, token) for token in ids)

    def run(self) -> Tensor:
        """Logits (1, T, V), or the encoder's vectors where there is no head."""
        return run_model(self.model, self.tokens, self.source)

    def resolve_token(self, token: TokenOrId, arg_name: str) -> int:
        """A token's id, from itself or from a text that is one token."""
        if isinstance(token, str):
            ids = _encode_text(self.tokenizer, token, arg_name)
            if len(ids) != 1:
                raise InputError(f"{arg_name} {token!r} is {len(ids)} tokens, not one; a leading blank often matters")
            return ids[0]
        size = self.model.config.vocab_size
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise InputError(f"{arg_name} is {token!r}; the vocabulary has ids 0 to {size - 1}")
        return token

    def resolve_position(self, position: int) -> int:
        length = self.tokens.shape[1]
        if isinstance(position, bool) or not isinstance(position, int) or not -length <= position < length:
            raise InputError(f"position is {position!r}; the text has {length} tokens, 0 to {length - 1}")
        return position % length


def prepare_inputs(model: Any, tokens: TextOrTokens, source: TextOrTokens | None = None) -> AnalysisInputs:
    """The model of a checkpoint (or itself) and the text as a row of tokens."""
    tokenizer, inner = getattr(model, "tokenizer", None), require_cutaway_model(model)
    if isinstance(inner, EncoderDecoder) != (source is not None):
        need = "reads a source beside the text; pass source=…" if source is None else "reads one text, and no source"
        raise InputError(f"this model {need}")
    row = _to_token_row("tokens", tokens, tokenizer).to(inner.device)
    beside = None if source is None else _to_token_row("source", source, tokenizer).to(inner.device)
    return AnalysisInputs(inner, tokenizer, row, beside)


def inputs_without_text(model: Any) -> AnalysisInputs:
    """A model without a text."""
    return AnalysisInputs(
        require_cutaway_model(model), getattr(model, "tokenizer", None), torch.zeros(1, 0, dtype=torch.long), None
    )


def _to_token_row(name: str, text: TextOrTokens, tokenizer: Any) -> Tensor:
    if isinstance(text, str):
        text = _encode_text(tokenizer, text, name, special=True)
    row = text if isinstance(text, Tensor) else torch.tensor(list(text), dtype=torch.long)
    row = row[None] if row.ndim == 1 else row
    if row.ndim != 2 or row.shape[0] != 1:
        raise InputError(f"{name} has shape {tuple(row.shape)}; an analysis looks at one text, so give one row")
    return row


def _encode_text(tokenizer: Any, text: str, arg_name: str, *, special: bool = False) -> list[int]:
    if tokenizer is None:
        raise InputError(f"{arg_name} is text, and there is no tokenizer; pass a checkpoint that has one, or token ids")
    return tokenizer.encode(text, add_special_tokens=special)


def token_text(tokenizer: Any, token: int) -> str:
    """A token as text; parts of a character as their bytes, and ids beyond the tokenizer's as numbers."""
    return str(token) if tokenizer is None else tokenizer.format_token(token) or str(token)


@contextmanager
def eval_mode(model: Transformer, *, enable_grad: bool = False) -> Iterator[None]:
    """Without dropout, and without gradients unless they are wanted; as it was, afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.set_grad_enabled(enable_grad):
            yield
    finally:
        for module in training:
            module.training = True


def upcast_float32(value: Tensor) -> Tensor:
    """In fp32 at least, as a plain tensor."""
    return value.as_subclass(Tensor).to(torch.promote_types(value.dtype, torch.float32))
