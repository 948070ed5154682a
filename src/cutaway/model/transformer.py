"""The models: DecoderOnly, EncoderOnly, EncoderDecoder, their base class Transformer, and `build`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import cutaway.config as cfg
from cutaway.argument_checks import check_dtype, check_positive_int, check_seed, check_tokens, resolve_device
from cutaway.errors import InputError
from cutaway.model import inputs
from cutaway.model.activation_checkpointing import ACTIVATION_CHECKPOINTING_MODES, ActivationCheckpointing
from cutaway.model.adapters.adapter_methods import AdapterMethods
from cutaway.model.attention import LatentAttention, MultiHead
from cutaway.model.cache import Cache
from cutaway.model.head import (
    Head,
    LMHead,
    MultipleChoiceHead,
    Pooler,
    PoolingHead,
    TokenClassificationHead,
    build_head,
)
from cutaway.model.init_weights import init_weights_with_seed
from cutaway.model.inputs import StackInputs
from cutaway.model.layers import EmbeddingTable
from cutaway.model.masks import TokenPositions, number_tokens
from cutaway.model.parallel.process_group import TensorParallel
from cutaway.model.stack import Stack

Tokens = Int[Tensor, "B T"]
Mask = Bool[Tensor, "B T"] | None
IntPerToken = Int[Tensor, "B T"] | None
Source = Int[Tensor, "B S"]
SourceMask = Bool[Tensor, "B S"] | None
HiddenStates = Float[Tensor, "B T d"]
HeadOutput = Float[Tensor, "B ..."]
"""Output of the head: logits (B, T, V) of an LM head, logits (B, L) or (B, T, L) of L labels, scores (B, C) of C
choices, or embeddings (B, d)."""


class Transformer(AdapterMethods, nn.Module):
    """Base class of DecoderOnly, EncoderOnly and EncoderDecoder. `build` selects one by the configuration."""

    config: cfg.Config
    head: Head | None
    tensor_parallel: TensorParallel | None = None
    """The processes that the model is split over; None if this process has the whole model."""

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name: `encoder`, `decoder` or both."""
        return {name: stack for name, stack in self.named_children() if isinstance(stack, Stack)}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def use_kernel(self, name: str) -> "Transformer":
        """Set the attention kernel: 'sdpa', 'explicit', 'flex' or 'auto' (see `build_kernel`)."""
        attentions = [module for module in self.modules() if isinstance(module, MultiHead | LatentAttention)]
        kernels = [attention.build_kernel(name).train(self.training) for attention in attentions]
        for attention, kernel in zip(attentions, kernels, strict=True):
            attention.kernel = kernel
        return self

    def use_activation_checkpointing(self, mode: ActivationCheckpointing, layers: int | None = None) -> "Transformer":
        """Set which activations to store for backward: all ('none'), costly ('selective') or block inputs ('full').

        `layers`: number of layers of each stack, from the first, to which the mode applies; None for all.
        """
        if mode not in ACTIVATION_CHECKPOINTING_MODES:
            modes = ", ".join(ACTIVATION_CHECKPOINTING_MODES)
            raise InputError(f"unknown activation checkpointing mode '{mode}'; use one of {modes}")
        if layers is not None:
            check_positive_int("layers", layers)
        for stack in self.stacks.values():
            indices = range(len(stack.blocks))
            stack.activation_checkpointing = [mode if layers is None or i < layers else "none" for i in indices]
        return self

    def new_cache(
        self, batch_size: int, max_seq_len: int, *, dtype: torch.dtype | None = None, chunk_size: int | None = None
    ) -> Cache:
        """Allocate an empty KV cache for `batch_size` rows of up to `max_seq_len` tokens.

        Calls with a cache compute no gradients. With `chunk_size`, sliding-window layers use ring buffers, and a call
        may pass at most `chunk_size` tokens.
        """
        check_positive_int("batch_size", batch_size)
        check_positive_int("max_seq_len", max_seq_len)
        if chunk_size is not None:
            check_positive_int("chunk_size", chunk_size)
        check_dtype(dtype)
        stack = self.stacks.get("decoder") or self.stacks["encoder"]
        return Cache(
            stack.cache_shapes,
            batch_size,
            max_seq_len,
            windows=stack.windows,
            has_cross_attention=len(self.stacks) == 2,
            device=self.device,
            dtype=dtype or self.dtype,
            chunk_size=chunk_size,
        )

    @property
    def has_lm_head(self) -> bool:
        """Whether the model computes logits of tokens, and not of labels, or embeddings, or hidden states only."""
        return self.head is not None and not isinstance(self.head, PoolingHead | TokenClassificationHead)

    @property
    def lm_head(self) -> LMHead:
        """The head, which must be an LM head."""
        if self.head is None or isinstance(self.head, PoolingHead | TokenClassificationHead):
            raise InputError(
                f"the model has a head of kind '{self.config.head.kind}', so it computes no logits of tokens; use a"
                " model with an LM head"
            )
        return self.head

    def per_token_output(self, *inputs: Tensor | None, **options: Any) -> Float[Tensor, "B T _"]:
        """Logits of an LM head, else hidden states. Takes the arguments of `forward`."""
        if self.has_lm_head:
            output: Tensor = self(*inputs, **options)
            return output
        run: Any = self.encode if isinstance(self, EncoderOnly) else self.hidden_states
        return run(*inputs, **options)

    def _apply_head(self, x: Float[Tensor, "B T d"], mask: Bool[Tensor, "B T"] | None) -> HeadOutput:
        """Output of the head. Heads that pool the hidden states of a sequence leave out those of padding."""
        assert self.head is not None
        return self.head(x, mask) if isinstance(self.head, PoolingHead) else self.head(x)

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}: {len(stack.blocks)} blocks" for name, stack in self.stacks.items())
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{type(self).__name__}({shape}, d_model={self.config.d_model}, {count:,} parameters)"

    def _run_stack(
        self,
        stack: Stack,
        stack_inputs: StackInputs,
        cache: Cache | None = None,
        memory: Float[Tensor, "B S d"] | None = None,
        memory_positions: TokenPositions | None = None,
    ) -> tuple[Float[Tensor, "B T d"], TokenPositions]:
        """Validate the inputs, number the tokens and run the stack. Return its output and the token positions."""
        stack_inputs = inputs.validate_inputs(stack, stack_inputs, cache)
        name, tokens, mask, token_types, positions, document_ids, prefix_lengths = stack_inputs
        batch_size, seq_len = tokens.shape
        slot_mappings = None
        if cache is None:
            token_positions = number_tokens(
                batch_size, seq_len, tokens.device, mask, document_ids, prefix_lengths, positions
            )
        else:
            token_positions, slot_mappings = cache.assign_slots(seq_len, mask)
        inputs.validate_positions(stack, name, token_positions, cache)
        with _no_grad_if_cached(cache):
            x = stack(tokens, token_positions, token_types, memory, memory_positions, cache, slot_mappings)
        if cache is not None:
            cache.commit(token_positions, has_padding=mask is not None)
        return x, token_positions


def _no_grad_if_cached(cache: Cache | None) -> torch.set_grad_enabled:
    """Disable gradients if there is a cache, because the cache would keep the graph of every decoding step alive."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and cache is None)


class EncoderOptions(TypedDict, total=False):
    """Optional keyword arguments of an encoder, besides the mask: integer tensors with one value per token."""

    token_types: IntPerToken
    positions: IntPerToken
    document_ids: IntPerToken


class DecoderOptions(EncoderOptions, total=False):
    """Optional keyword arguments of a decoder: those of an encoder, and the length of each row's prefix (prefix LM)."""

    prefix_lengths: Int[Tensor, " B"] | None


class DecoderOnly(Transformer):
    """A causal decoder (GPT): the logits at a position predict the next token."""

    def __init__(self, config: cfg.Decoder) -> None:
        super().__init__()
        self.config = config
        table = EmbeddingTable(config.vocab_size, config.decoder.embedding.token_table_dim(config.d_model))
        self.decoder = Stack(config.decoder, config.d_model, table, causal=True)
        self.head = build_head(config.head, config.d_model, config.vocab_size, table)
        self.pad_token_id: int | None = getattr(config.head, "pad_token_id", None)  # torch.compile traces no getattr

    def hidden_states(
        self, tokens: Tokens, mask: Mask = None, *, cache: Cache | None = None, **options: Unpack[DecoderOptions]
    ) -> HiddenStates:
        """Compute the residual stream after the final norm, the input of the head. Takes the arguments of `forward`."""
        return self._run_stack(self.decoder, StackInputs("tokens", tokens, mask, **options), cache)[0]

    def forward(
        self,
        tokens: Tokens,
        mask: Mask = None,
        *,
        token_types: IntPerToken = None,
        positions: IntPerToken = None,
        document_ids: IntPerToken = None,
        prefix_lengths: Int[Tensor, " B"] | None = None,
        cache: Cache | None = None,
    ) -> HeadOutput:
        """Compute the output of the head: with an LM head, the logits of the next token at each position.

        `mask` is True for tokens and False for padding; `document_ids` separates the documents of a packed sequence;
        the first `prefix_lengths[b]` tokens of row b attend to each other in both directions (prefix LM).
        """
        inputs.check_head_inputs(self.head, cache, document_ids)
        with _no_grad_if_cached(cache):
            x = self.hidden_states(
                tokens,
                mask,
                token_types=token_types,
                positions=positions,
                document_ids=document_ids,
                prefix_lengths=prefix_lengths,
                cache=cache,
            )
            if self.pad_token_id is not None:
                mask = (tokens != self.pad_token_id) & (True if mask is None else mask)
            return self._apply_head(x, mask)


class EncoderOnly(Transformer):
    """A bidirectional encoder (BERT): hidden states, and the output of the head if the configuration has one."""

    def __init__(self, config: cfg.Encoder) -> None:
        super().__init__()
        self.config = config
        table = EmbeddingTable(config.vocab_size, config.encoder.embedding.token_table_dim(config.d_model))
        self.encoder = Stack(config.encoder, config.d_model, table, causal=False)
        self.head = build_head(config.head, config.d_model, config.vocab_size, table)
        self.pooler = Pooler(config.d_model) if config.pooler else None

    def encode(
        self, tokens: Tokens, mask: Mask = None, *, cache: Cache | None = None, **options: Unpack[EncoderOptions]
    ) -> HiddenStates:
        """Compute the last hidden state of each token. `options` are `token_types`, `positions` and `document_ids`."""
        return self._run_stack(self.encoder, StackInputs("tokens", tokens, mask, **options), cache)[0]

    def pool(self, tokens: Tokens, mask: Mask = None, *, token_types: IntPerToken = None) -> Float[Tensor, "B d"]:
        """Compute one vector per sequence: the output of the pooler for the first token."""
        if self.pooler is None:
            raise InputError("this model has no pooler; use encode(...) and average its hidden states instead")
        return self.pooler(*self._run_stack(self.encoder, StackInputs("tokens", tokens, mask, token_types)))

    def forward(
        self,
        tokens: Int[Tensor, "B *C T"],
        mask: Bool[Tensor, "B *C T"] | None = None,
        *,
        cache: Cache | None = None,
        **options: Unpack[EncoderOptions],
    ) -> HeadOutput:
        """Compute the output of the head: with an LM head, masked-LM logits for each position.

        Takes the arguments of `encode`. For a multiple-choice head, they have the shape (batch, choices, length).
        """
        if self.head is None:
            raise InputError("this model has no LM head, so it has no logits; use model.encode(tokens, mask)")
        inputs.check_head_inputs(self.head, cache, options.get("document_ids"))
        if isinstance(self.head, MultipleChoiceHead):
            return self._score_choices(tokens, mask, options)
        return self._apply_head(self.encode(tokens, mask, cache=cache, **options), mask)

    def _score_choices(
        self, tokens: Int[Tensor, "B C T"], mask: Bool[Tensor, "B C T"] | None, options: EncoderOptions
    ) -> Float[Tensor, "B C"]:
        """Score of each choice. The choices are encoded as B·C rows, which do not attend to each other."""
        inputs.check_choices(tokens)
        rows: Any = {name: value.flatten(0, 1) for name, value in options.items() if isinstance(value, Tensor)}
        mask = None if mask is None else mask.flatten(0, 1)
        x = self.encode(tokens.flatten(0, 1), mask, **rows)
        return self._apply_head(x, mask).view(tokens.shape[:2])


class EncoderDecoder(Transformer):
    """An encoder-decoder (T5, BART): a bidirectional encoder and a causal decoder with cross-attention."""

    def __init__(self, config: cfg.EncoderDecoder) -> None:
        super().__init__()
        self.config = config
        d_model = config.d_model
        table = EmbeddingTable(config.vocab_size, config.decoder.embedding.token_table_dim(d_model))
        source_table = table
        if config.source_vocab_size is not None:
            source_table = EmbeddingTable(config.source_vocab_size, config.encoder.embedding.token_table_dim(d_model))
        self.encoder = Stack(config.encoder, d_model, source_table, causal=False)
        self.decoder = Stack(config.decoder, d_model, table, causal=True)
        self.head = build_head(config.head, d_model, config.vocab_size, table)

    def encode(self, source: Source, source_mask: SourceMask = None) -> Float[Tensor, "B S d"]:
        """Compute the encoder output, which cross-attention reads."""
        return self._run_stack(self.encoder, StackInputs("source", source, source_mask))[0]

    def hidden_states(
        self,
        source: Source | None,
        target: Tokens,
        source_mask: SourceMask = None,
        target_mask: Mask = None,
        *,
        cache: Cache | None = None,
    ) -> HiddenStates:
        """Residual stream of the decoder after the final norm, the input of the head."""
        target = check_tokens("target", target, self.decoder.vocab_size)
        if cache is not None:
            inputs.check_cache(cache, self.decoder.cache_shapes, "target", len(target))
        memory, memory_positions = self._get_memory(source, source_mask, target, cache)
        target_inputs = StackInputs("target", target, target_mask)
        x, _ = self._run_stack(self.decoder, target_inputs, cache, memory, memory_positions)
        if cache is not None:
            cache.memory_positions = memory_positions
        return x

    def _get_memory(
        self, source: Source | None, source_mask: SourceMask, target: Tokens, cache: Cache | None
    ) -> tuple[Float[Tensor, "B S d"] | None, TokenPositions]:
        """Return the encoder output, or None if the cache already holds the source, and the positions of the source."""
        if cache is not None and cache.memory_positions is not None:
            if source is not None:
                raise InputError("the cache already holds a source; pass source=None to continue, or a new cache")
            return None, cache.memory_positions
        if source is None:
            raise InputError("source is None, but no cache holds a source yet; pass the source in the first call")
        memory, memory_positions = self._run_stack(self.encoder, StackInputs("source", source, source_mask))
        if len(source) != len(target):
            raise InputError(f"source has {len(source)} rows and target {len(target)}; pass the same number of rows")
        return memory, memory_positions

    def forward(
        self,
        source: Source | None,
        target: Tokens,
        source_mask: SourceMask = None,
        target_mask: Mask = None,
        *,
        cache: Cache | None = None,
    ) -> HeadOutput:
        """Compute the output of the head: with an LM head, logits for the token after each target token.

        With a cache, later calls pass source=None.
        """
        inputs.check_head_inputs(self.head, cache)
        with _no_grad_if_cached(cache):
            x = self.hidden_states(source, target, source_mask, target_mask, cache=cache)
            return self._apply_head(x, target_mask)


def build(
    source: cfg.Config | Mapping[str, Any] | str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> Transformer:
    """Build a model with newly initialized weights from a Config, a preset name, a dict or a file.

    On the meta device, parameters have shapes but no values.
    """
    config = cfg.config(source)
    check_dtype(dtype)
    check_seed(seed)
    forms = {"decoder": DecoderOnly, "encoder": EncoderOnly, "encoder-decoder": EncoderDecoder}
    with torch.device("meta"):
        model: Transformer = forms[config.form](config)
    model = model.to(dtype) if dtype is not None else model
    target = resolve_device(device)
    if target.type != "meta":
        model = model.to_empty(device=target)
        init_weights_with_seed(model, config, seed)
    return model.eval()
