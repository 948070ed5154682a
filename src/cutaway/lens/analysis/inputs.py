"""Inputs of an analysis (a model, its tokenizer and the tokens of one text)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.eval_mode import eval_mode
from cutaway.lens.adapters import ModelLike, run_model
from cutaway.lens.adapters.describe import describe_if_needed
from cutaway.lens.adapters.described_model import DescribedModel
from cutaway.lens.adapters.tokenizer import TokenizerLike, adapt_tokenizer
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


@dataclass(frozen=True)
class AnalysisInputs:
    """A model, its tokenizer or None, and the tokens of one text, (1, T).

    `source` holds the encoder's tokens if the model is an encoder-decoder, else None. `model` is what `trace` and
    `edit` take. Forward passes run it; `structure`, `stack` and `blocks` are used to read its layout and weights only.
    """

    model: Transformer | DescribedModel
    tokenizer: TokenizerLike | None
    tokens: Tensor
    source: Tensor | None

    @property
    def module(self) -> nn.Module:
        """The module that is called."""
        return self.model.model if isinstance(self.model, DescribedModel) else self.model

    @property
    def structure(self) -> Transformer:
        """The model as a cutaway model: itself, or one on the meta device with the weights that analyses read."""
        return self.model.structure if isinstance(self.model, DescribedModel) else self.model

    @property
    def cutaway_model(self) -> Transformer | None:
        """The model if it is a cutaway model, which can be run in parts and with a KV cache, else None."""
        return self.model if isinstance(self.model, Transformer) else None

    def require_cutaway_model(self, analysis: str) -> Transformer:
        """Return the cutaway model. Raise if the model is of another library."""
        if self.cutaway_model is None:
            name = type(self.module).__name__
            raise InputError(f"{analysis} cannot be measured in a {name} of another library; load it with ct.load(…)")
        return self.cutaway_model

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def stack(self) -> Stack:
        """The stack that processes `tokens` and whose residual stream the head reads."""
        return self.structure.stacks.get("decoder") or self.structure.stacks["encoder"]

    @property
    def blocks(self) -> list[Block | ParallelBlock]:
        return get_blocks(self.stack)

    @property
    def site_prefix(self) -> str:
        """Prefix of the site names of `stack`: "decoder." in an encoder-decoder, else empty."""
        return "decoder." if len(self.structure.stacks) > 1 else ""

    @property
    def resid_sites(self) -> dict[str, str]:
        """Layer label ("embed", "0", …) → site of the residual stream after the embedding or after that block."""
        blocks = {str(layer): f"{self.site_prefix}blocks.{layer}.resid_post" for layer in range(len(self.blocks))}
        return {"embed": f"{self.site_prefix}embed"} | blocks

    def require_head(self) -> LMHead:
        """Return the language modeling head. Raise if the model has none."""
        head = getattr(self.structure, "head", None)
        if not isinstance(head, LMHead):
            raise InputError(
                "this model has no language modeling head, so it has no logits of tokens; load a model with one"
            )
        return head

    def require_known_head(self) -> LMHead:
        """Return the language modeling head. Raise if the model has none, or if its weight is not known."""
        head = self.require_head()
        assert isinstance(head.matrix.weight, Tensor)
        self.read_weight(head.matrix.weight[:1], "the head")
        return head

    def read_weight(self, weight: Tensor | nn.Parameter, name: str) -> Tensor:
        """Return a weight of the structure in at least fp32. Raise if the model's own weight is not known."""
        if weight.is_meta and self.cutaway_model is None:
            problem = f"the weight of {name} is not known: it is quantized, or its module was not found or not stated"
            raise InputError(f"{problem}; load the model with ct.load, or state it with lens.describe_model(sites=…)")
        return upcast_float32(weight)

    def require_linear_head(self, analysis: str) -> LMHead:
        """Return the language modeling head. Raise if the logits are not a linear function of the head's input."""
        head = self.require_known_head()
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
        """Return the logits (1, T, V), or the hidden states of a model without LM head, in the model's current mode."""
        return run_model(self.model, self.tokens, self.source)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Context manager: evaluation mode without gradients, in which activation checkpointing is not active."""
        with torch.no_grad(), eval_mode(self.module):
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

        In a cutaway model, the head is applied at this position only: with a large vocabulary, the logits of all
        positions of a batch would need more memory than the rest of the forward pass.
        """
        head, model = self.require_head(), self.cutaway_model
        with self.eval_mode():
            if model is None:
                assert cache is None
                return upcast_float32(self.forward()[:, position])
            if isinstance(model, EncoderDecoder):
                hidden = model.hidden_states(self.source, self.tokens, cache=cache)
            elif isinstance(model, EncoderOnly):
                hidden = model.encode(self.tokens)
            else:
                assert isinstance(model, DecoderOnly)
                hidden = model.hidden_states(self.tokens, cache=cache)
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
        size = self.structure.config.vocab_size
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise InputError(f"{arg_name} is {token!r}; pass a token id from 0 to {size - 1}")
        return token

    def resolve_position(self, position: int) -> int:
        length = self.tokens.shape[1]
        return resolve_index(position, length, "position", f"the {length} tokens of the text")


def prepare_inputs(
    model: "ModelLike | AnalysisInputs", tokens: TextOrTokens, source: TextOrTokens | None = None
) -> AnalysisInputs:
    """Unwrap the model, and convert the text, and the source of an encoder-decoder, to token ids (1, T)."""
    inputs = inputs_without_text(model)
    is_encoder_decoder = isinstance(inputs.structure, EncoderDecoder)
    if is_encoder_decoder and source is None:
        raise InputError("this model is an encoder-decoder, so it needs a source; pass source=…")
    if not is_encoder_decoder and source is not None:
        raise InputError("source is set, but this model is not an encoder-decoder; leave source out")
    token_row = _to_token_row("tokens", tokens, inputs.tokenizer).to(inputs.device)
    source_row = None if source is None else _to_token_row("source", source, inputs.tokenizer).to(inputs.device)
    return replace(inputs, tokens=token_row, source=source_row)


def inputs_without_text(model: "ModelLike | AnalysisInputs") -> AnalysisInputs:
    """Return inputs with an empty text (1, 0), for analyses that only use the weights."""
    no_tokens = torch.zeros(1, 0, dtype=torch.long)
    if isinstance(model, AnalysisInputs):
        return replace(model, tokens=no_tokens, source=None)
    return AnalysisInputs(
        describe_if_needed(model), adapt_tokenizer(getattr(model, "tokenizer", None)), no_tokens, None
    )


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
        problem = f"{arg_name} is text, but there is no tokenizer"
        raise InputError(f"{problem}; pass token ids, a checkpoint with a tokenizer, or describe_model(…, tokenizer=…)")
    return tokenizer.encode(text, add_special_tokens=special)


def token_text(tokenizer: TokenizerLike | None, token: int) -> str:
    """Return a token as text. Part of a character is shown as bytes, an id unknown to the tokenizer as a number."""
    return str(token) if tokenizer is None else tokenizer.format_token(token) or str(token)


def upcast_float32(value: Tensor) -> Tensor:
    """Return `value` as a plain Tensor with a dtype of at least fp32."""
    return value.as_subclass(Tensor).to(torch.promote_types(value.dtype, torch.float32))
