"""The three forms: tokens in, logits out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.config import Config, Decoder, Encoder, Head
from cutaway.config import EncoderDecoder as EncoderDecoderConfig
from cutaway.config import config as read_config
from cutaway.errors import InputError
from cutaway.model import embedding as ends
from cutaway.model import inputs
from cutaway.model.cache import Cache
from cutaway.model.init import draw
from cutaway.model.layers import Table
from cutaway.model.masks import Places
from cutaway.model.stack import Stack
from cutaway.model.transformer import Transformer, gradients_without

Tokens = Int[Tensor, "B T"]
Mask = Bool[Tensor, "B T"] | None
Beside = Int[Tensor, "B T"] | None
Source = Int[Tensor, "B S"]
SourceMask = Bool[Tensor, "B S"] | None
Stream = Float[Tensor, "B T d"]
Logits = Float[Tensor, "B T V"]


class DecoderOnly(Transformer):
    """Each token sees itself and what came before; the logits at a position are for the next token."""

    def __init__(self, config: Decoder) -> None:
        super().__init__()
        self.config = config
        table = Table(config.vocab_size, config.decoder.embedding.table_width(config.d_model))
        self.decoder = Stack(config.decoder, config.d_model, table, causal=True)
        assert isinstance(config.head, Head)
        self.head = ends.Head(config.head, config.d_model, config.vocab_size, table)

    def hidden(self, tokens: Tokens, mask: Mask = None, **how: Any) -> Stream:
        """The stream after the final norm, which the head reads."""
        return self.run_stack(self.decoder, "tokens", tokens, mask, vocab_size=self.config.vocab_size, **how)[0]

    def forward(
        self,
        tokens: Tokens,
        mask: Mask = None,
        *,
        types: Beside = None,
        positions: Beside = None,
        documents: Beside = None,
        prefix: Int[Tensor, " B"] | None = None,
        cache: Cache | None = None,
    ) -> Logits:
        """Logits. `mask` is True for real tokens; `documents` numbers packed texts; a `prefix` sees itself whole."""
        how = {"types": types, "positions": positions, "documents": documents, "prefix": prefix, "cache": cache}
        with gradients_without(cache):
            return self.head(self.hidden(tokens, mask, **how))


class EncoderOnly(Transformer):
    """Every token sees every token: a vector for each, in context, and logits where there is a head."""

    def __init__(self, config: Encoder) -> None:
        super().__init__()
        self.config = config
        table = Table(config.vocab_size, config.encoder.embedding.table_width(config.d_model))
        self.encoder = Stack(config.encoder, config.d_model, table, causal=False)
        head = config.head
        self.head = ends.Head(head, config.d_model, config.vocab_size, table) if isinstance(head, Head) else None
        self.pooler = ends.Pooler(config.d_model) if config.pooler else None

    def encode(
        self,
        tokens: Tokens,
        mask: Mask = None,
        *,
        types: Beside = None,
        positions: Beside = None,
        documents: Beside = None,
        cache: Cache | None = None,
    ) -> Stream:
        """A vector for each token."""
        how: dict[str, Any] = {"types": types, "positions": positions, "documents": documents, "cache": cache}
        return self.run_stack(self.encoder, "tokens", tokens, mask, vocab_size=self.config.vocab_size, **how)[0]

    def pool(self, tokens: Tokens, mask: Mask = None, *, types: Beside = None) -> Float[Tensor, "B d"]:
        """One vector for each text, from its first token."""
        if self.pooler is None:
            raise InputError("this model has no pooler; use encode(...), and average its vectors if one is needed")
        size = self.config.vocab_size
        x, where = self.run_stack(self.encoder, "tokens", tokens, mask, vocab_size=size, types=types)
        return self.pooler(x, where)

    def forward(self, tokens: Tokens, mask: Mask = None, **how: Any) -> Logits:
        """Logits for each token's own place, for filling masks."""
        if self.head is None:
            raise InputError("this model has no head, so it has no logits; use model.encode(tokens, mask)")
        return self.head(self.encode(tokens, mask, **how))


class EncoderDecoder(Transformer):
    """A source that is read whole, and a target that is written token by token while looking at it."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        table = Table(config.vocab_size, config.decoder.embedding.table_width(d_model))
        source_table = table
        if config.source_vocab_size is not None:
            source_table = Table(config.source_vocab_size, config.encoder.embedding.table_width(d_model))
        self.encoder = Stack(config.encoder, d_model, source_table, causal=False)
        self.decoder = Stack(config.decoder, d_model, table, causal=True)
        assert isinstance(config.head, Head)
        self.head = ends.Head(config.head, d_model, config.vocab_size, table)

    def encode(self, source: Source, source_mask: SourceMask = None) -> Float[Tensor, "B S d"]:
        """The memory that the decoder reads."""
        return self.read_source(source, source_mask)[0]

    def read_source(self, source: Source, mask: SourceMask) -> tuple[Float[Tensor, "B S d"], Places]:
        vocab_size = self.config.source_vocab_size or self.config.vocab_size  # type: ignore[union-attr]
        return self.run_stack(self.encoder, "source", source, mask, vocab_size=vocab_size)

    def hidden(
        self,
        source: Source | None,
        target: Tokens,
        source_mask: SourceMask = None,
        target_mask: Mask = None,
        *,
        cache: Cache | None = None,
    ) -> Stream:
        """The decoder's stream after its final norm, which the head reads."""
        target = inputs.check_tokens("target", target, self.config.vocab_size)
        if cache is not None:
            inputs.check_cache(cache, self.decoder.cache_widths, "target", len(target))
        memory, where = self.recall(source, source_mask, target, cache)
        how: dict[str, Any] = {"cache": cache, "memory": memory, "memory_places": where}
        size = self.config.vocab_size
        x, _ = self.run_stack(self.decoder, "target", target, target_mask, vocab_size=size, **how)
        if cache is not None:
            cache.memory = where
        return x

    def recall(
        self, source: Source | None, source_mask: SourceMask, target: Tokens, cache: Cache | None
    ) -> tuple[Float[Tensor, "B S d"] | None, Places]:
        """The encoder's output and its places; with a cache that knows the source, only the places."""
        if cache is not None and cache.memory is not None:
            if source is not None:
                raise InputError("the cache already holds a source; pass None to go on with it, or a new cache")
            return None, cache.memory
        if source is None:
            raise InputError(
                "source is None, but no source was read yet; pass the source's tokens with the first target"
            )
        memory, where = self.read_source(source, source_mask)
        if len(source) != len(target):
            raise InputError(f"source has {len(source)} rows and target {len(target)}; they must go together")
        return memory, where

    def forward(
        self,
        source: Source | None,
        target: Tokens,
        source_mask: SourceMask = None,
        target_mask: Mask = None,
        *,
        cache: Cache | None = None,
    ) -> Logits:
        """Logits for the token after each target token. With a cache, later calls pass None as the source."""
        with gradients_without(cache):
            return self.head(self.hidden(source, target, source_mask, target_mask, cache=cache))


def build(
    source: Config | Mapping[str, Any] | str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> Transformer:
    """The model that a configuration (or a preset's name, a dict or a file) describes, with fresh weights.

    On the meta device it has shapes and no values.
    """
    config = read_config(source)
    inputs.check_dtype(dtype)
    inputs.check_seed(seed)
    forms = {"decoder": DecoderOnly, "encoder": EncoderOnly, "encoder-decoder": EncoderDecoder}
    with torch.device("meta"):
        model: Transformer = forms[config.form](config)
    model = model.to(dtype) if dtype is not None else model
    target = inputs.check_device(device)
    if target.type != "meta":
        model = model.to_empty(device=target)
        draw(model, config, seed)
    return model.eval()
