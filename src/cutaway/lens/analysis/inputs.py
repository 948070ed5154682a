"""Inputs of an analysis (a model, its tokenizer and the tokens of one text)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.adapters import ModelLike, require_cutaway_model, run_model
from cutaway.lens.sites import get_blocks, has_additive_residual, resolve_index
from cutaway.lens.trace import Trace
from cutaway.model import DecoderOnly, EncoderDecoder, EncoderOnly, Transformer
from cutaway.model.block import Block, ParallelBlock
from cutaway.model.cache import Cache
from cutaway.model.head import LMHead
from cutaway.model.stack import Stack

TextOrTokens = str | Sequence[int] | Tensor
"""A text (needs a tokenizer) or its token ids."""
TokenOrId = int | str
"""A token id, or a text that is exactly one token."""


class TokenizerLike(Protocol):
    """The tokenizer methods that an analysis uses. `lens` does not import the tokenizer package."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def format_token(self, token_id: int, /) -> str | None: ...


@dataclass(frozen=True)
class AnalysisInputs:
    """A model, its tokenizer or None, and the tokens of one text, (1, T).

    `source` holds the encoder's tokens if the model is an encoder-decoder, else None.
    """

    model: Transformer
    tokenizer: TokenizerLike | None
    tokens: Tensor
    source: Tensor | None

    @property
    def stack(self) -> Stack:
        """The stack that processes `tokens` and whose residual stream the head reads."""
        return self.model.stacks.get("decoder") or self.model.stacks["encoder"]

    @property
    def blocks(self) -> list[Block | ParallelBlock]:
        return get_blocks(self.stack)

    @property
    def site_prefix(self) -> str:
        """Prefix of the site names of `stack`: "decoder." in an encoder-decoder, else empty."""
        return "decoder." if len(self.model.stacks) > 1 else ""

    @property
    def resid_sites(self) -> dict[str, str]:
        """Layer label ("embed", "0", …) → site of the residual stream after the embedding or after that block."""
        blocks = {str(layer): f"{self.site_prefix}blocks.{layer}.resid_post" for layer in range(len(self.blocks))}
        return {"embed": f"{self.site_prefix}embed"} | blocks

    def require_head(self) -> LMHead:
        """Return the language modeling head. Raise if the model has none."""
        head = getattr(self.model, "head", None)
        if head is None:
            raise InputError("this model has no head, so it has no logits; load a model with a language modeling head")
        return head

    def require_linear_head(self, analysis: str) -> LMHead:
        """Return the language modeling head. Raise if the logits are not a linear function of the head's input."""
        head = self.require_head()
        if head.transform is not None:
            raise InputError(f"the head has a layer before its output matrix; {analysis} needs a linear head")
        return head

    def require_additive_residual(self, analysis: str) -> None:
        """Raise if the residual stream is not the sum of the embedding and the sublayer outputs."""
        if not has_additive_residual(self.stack):
            problem = "the residual stream is not a sum of sublayer outputs: it has norms (post-norm) or scales"
            raise InputError(f"{problem}; {analysis} needs pre, sandwich, output or parallel placement")

    @property
    def token_labels(self) -> tuple[str, ...]:
        return self.decode_tokens(self.tokens[0].tolist())

    def decode_tokens(self, ids: list[int]) -> tuple[str, ...]:
        """Return each token as text, or as its id if there is no tokenizer."""
        return tuple(token_text(self.tokenizer, token) for token in ids)

    def forward(self) -> Tensor:
        """Return the logits (1, T, V), or the encoder output if the model has no head, in the model's current mode."""
        return run_model(self.model, self.tokens, self.source)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context manager: evaluation mode without gradients, in which activation checkpointing is not active."""
        with torch.no_grad(), eval_mode(self.model):
            yield

    def run(self) -> Tensor:
        """Return the output of `forward` in evaluation mode, without gradients."""
        with self.eval_mode():
            return self.forward()

    def logits(self) -> Tensor:
        """Return the logits of the text in at least fp32, (T, V), in evaluation mode."""
        return upcast_float32(self.run())[0]

    def logits_at(self, position: int, cache: Cache | None = None) -> Tensor:
        """Return the logits at one position in at least fp32, (B, V), in evaluation mode.

        `cache` is the KV cache of a decoder; `source` is None if the cache holds it already.

        The head is applied at this position only: with a large vocabulary, the logits of all positions of a batch would
        need more memory than the rest of the forward pass.
        """
        head = self.require_head()
        with self.eval_mode():
            if isinstance(self.model, EncoderDecoder):
                hidden = self.model.hidden_states(self.source, self.tokens, cache=cache)
            elif isinstance(self.model, EncoderOnly):
                hidden = self.model.encode(self.tokens)
            else:
                assert isinstance(self.model, DecoderOnly)
                hidden = self.model.hidden_states(self.tokens, cache=cache)
            return upcast_float32(head(hidden[:, position]))

    def trace(self, *names: str) -> Trace:
        """Run the model in evaluation mode, and record the activations at these sites."""
        with self.eval_mode(), Trace(self.model, *names) as t:
            self.forward()
        return t

    def resolve_token(self, token: TokenOrId, arg_name: str) -> int:
        """Return the id of a token given as an id or as a text that is exactly one token."""
        if isinstance(token, str):
            ids = _encode_text(self.tokenizer, token, arg_name)
            if len(ids) != 1:
                raise InputError(f"{arg_name} {token!r} is {len(ids)} tokens; pass one (a leading space often matters)")
            return ids[0]
        size = self.model.config.vocab_size
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise InputError(f"{arg_name} is {token!r}; pass a token id from 0 to {size - 1}")
        return token

    def resolve_position(self, position: int) -> int:
        length = self.tokens.shape[1]
        return resolve_index(position, length, "position", f"the {length} tokens of the text")


def prepare_inputs(model: ModelLike, tokens: TextOrTokens, source: TextOrTokens | None = None) -> AnalysisInputs:
    """Unwrap the model, and convert the text, and the source of an encoder-decoder, to token ids (1, T)."""
    tokenizer, transformer = getattr(model, "tokenizer", None), require_cutaway_model(model)
    if isinstance(transformer, EncoderDecoder) and source is None:
        raise InputError("this model is an encoder-decoder, so it needs a source; pass source=…")
    if not isinstance(transformer, EncoderDecoder) and source is not None:
        raise InputError("source is set, but this model is not an encoder-decoder; leave source out")
    token_row = _to_token_row("tokens", tokens, tokenizer).to(transformer.device)
    source_row = None if source is None else _to_token_row("source", source, tokenizer).to(transformer.device)
    return AnalysisInputs(transformer, tokenizer, token_row, source_row)


def inputs_without_text(model: ModelLike) -> AnalysisInputs:
    """Return inputs with an empty text (1, 0), for analyses that only use the weights."""
    no_tokens = torch.zeros(1, 0, dtype=torch.long)
    return AnalysisInputs(require_cutaway_model(model), getattr(model, "tokenizer", None), no_tokens, None)


def _to_token_row(name: str, text: TextOrTokens, tokenizer: TokenizerLike | None) -> Tensor:
    if isinstance(text, str):
        text = _encode_text(tokenizer, text, name, special=True)
    row = text if isinstance(text, Tensor) else torch.tensor(list(text), dtype=torch.long)
    row = row[None] if row.ndim == 1 else row
    if row.ndim != 2 or row.shape[0] != 1:
        raise InputError(f"{name} has shape {tuple(row.shape)}; an analysis takes one text, so pass (1, T) or (T,)")
    return row


def _encode_text(tokenizer: TokenizerLike | None, text: str, arg_name: str, *, special: bool = False) -> list[int]:
    if tokenizer is None:
        raise InputError(f"{arg_name} is text, but there is no tokenizer; pass a checkpoint that has one, or token ids")
    return tokenizer.encode(text, add_special_tokens=special)


def token_text(tokenizer: TokenizerLike | None, token: int) -> str:
    """Return a token as text. Part of a character is shown as bytes, an id unknown to the tokenizer as a number."""
    return str(token) if tokenizer is None else tokenizer.format_token(token) or str(token)


def upcast_float32(value: Tensor) -> Tensor:
    """Return `value` as a plain Tensor with a dtype of at least fp32."""
    return value.as_subclass(Tensor).to(torch.promote_types(value.dtype, torch.float32))
