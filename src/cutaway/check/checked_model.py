"""What is checked: a Transformer as a handful of functions it offers, and a few of its properties.

Each function is plain: tensors in, tensors out. For models of cutaway and of transformers they are found; for all
others they are keyword arguments of `ct.check`. What is not offered is not checked, and the report says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cutaway.check.numerics import Difference

ModelKind = Literal["decoder", "encoder", "encoder-decoder"]


LogitsFunction = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class CheckedModel:
    """Tokens are (B, T) integers, masks (B, T) booleans with True for real tokens, logits (B, T, V)."""

    name: str = "model"
    kind: ModelKind = "decoder"
    """Decoders see the past only, encoders both sides; of an encoder-decoder the decoder is checked, and its source."""

    # what it can be asked
    logits: LogitsFunction | None = None
    """tokens → logits."""
    logits_with_mask: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → logits."""
    logits_with_mask_only: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → logits, where `logits_with_mask` tells positions too: here the mask alone must hide padding."""
    logits_with_positions: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, positions (B, T) → logits."""
    logits_with_documents: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, documents (B, T; 0, 0, 1, 1, 1 …) → logits, as if each document were alone."""
    logits_with_cache: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None
    """tokens, state (None at first) → logits of these tokens, the state after them."""
    generate: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → the (B, n) tokens that follow, each the likeliest."""
    generate_padded: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """tokens, mask, n → the same for texts padded on the left."""
    beam_search: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    """tokens (1, T), n, k → the k best (k, n) continuations, and their (k,) sums of log-probabilities."""
    sample: Callable[..., Tensor] | None = None
    """logits (V,), n → n tokens drawn from softmax(logits); it may take temperature=, top_k= and top_p= too."""
    generate_speculative: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → the (B, n) tokens of speculative decoding at temperature 0."""
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, labels (the same tokens; -100 is not asked) → the mean loss, as training has it."""
    logits_with_labels: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, labels (as `loss` takes them) → the logits of that very pass."""
    accumulated_loss: Callable[[Sequence[tuple[Tensor, Tensor]]], Tensor] | None = None
    """(tokens, labels) of each piece → the loss of all of them accumulated, as training has it."""
    logits_with_source: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """source, source mask or None, tokens → logits."""
    load_balancing_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → the loss that spreads tokens over experts."""
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """q (B, H, T, D), k, v (B, G, T, D) → (B, H, T, D)."""
    logits_with_filled_cache: Callable[[Tensor, float], Tensor] | None = None
    """tokens, value → logits of a cached pass in whose unused cache slots the value was written."""
    logits_with_rolling_cache: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → logits of a text read in pieces of n tokens, in a cache that keeps no more than a window."""
    logits_by_kernel: Mapping[str, LogitsFunction] = field(default_factory=dict)
    """Names of attention kernels, and the logits by each."""
    config_variants: Callable[[], Mapping[str, Callable[[], LogitsFunction]]] | None = None
    """() → by the name of a setting: how to make the model with that setting changed, with the same weights; a
    ValueError is a refusal, which is as good. Under "" is what they are compared with, where it is not the model."""
    reload_logits: Callable[[], LogitsFunction] | None = None
    """() → the logits of the model that was saved, and loaded again."""
    set_activation_checkpointing: Callable[[bool], None] | None = None
    """Switches activation checkpointing on and off."""
    reference_logits: LogitsFunction | None = None
    """The same model by another implementation."""
    build_module: Callable[[], nn.Module] | None = None
    """() → the module made anew from the same settings, with any weights."""
    reload: Callable[[], "ReloadedModel"] | None = None
    """() → what was saved and loaded again, with what the loading said."""
    load_from_meta: Callable[[], nn.Module] | None = None
    """() → the module made on the meta device and filled with these weights, as its own loading does it."""
    module: nn.Module | None = None

    # properties
    vocab_size: int | None = None
    max_seq_len: int | None = None
    """Tokens it can read."""
    window: int | None = None
    """Tokens that every layer's attention sees, itself included; None for all."""
    windows: tuple[int, ...] = ()
    """The windows of those layers that have one, each once."""
    num_layers: int | None = None
    tied_embeddings: bool | None = None
    """Whether the head is the embedding's table."""
    attention_scale: float | None = None
    """What q·k is multiplied by; 1/sqrt(d_head) where not given."""
    rope: Mapping[str, Any] | None = None
    """How q and k are turned, in the words of cutaway's configuration: theta, rotary_dim, layout, scaling."""
    has_positions: bool = True
    """Whether it has positions at all."""
    relative_positions: bool | None = None
    """Whether only distances between positions count (RoPE, ALiBi), so that all may be shifted."""
    positions_skip_padding: bool | None = None
    """Whether `logits_with_mask` numbers real tokens only, so that padding may stand on the left; None: not known."""
    positions_from_pad_token: bool = False
    """Whether positions are counted by the padding token (RoBERTa), so that padding must be just that."""
    source_vocab_size: int | None = None
    """Tokens of the source's own vocabulary, where it has one."""
    special_token_ids: tuple[int, ...] = ()
    """Tokens with a meaning of their own (padding, ends), which are not drawn."""
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    trained: bool | None = None

    def available_functions(self) -> list[str]:
        """The names of what it can be asked."""
        return [name for name in FUNCTION_FIELDS if getattr(self, name) is not None and getattr(self, name) != {}]

    def properties(self) -> dict[str, Any]:
        """What is known of it, in words and numbers."""
        known = {name: getattr(self, name) for name in PROPERTY_FIELDS}
        told = {name: str(value) if name in ("device", "dtype") else value for name, value in known.items()}
        return {name: value for name, value in told.items() if value is not None and value != ()}


FUNCTION_FIELDS = [
    each.name
    for each in fields(CheckedModel)
    if "Callable" in str(each.type) or each.name in ("logits", "logits_by_kernel", "module", "reference_logits")
]


PROPERTY_FIELDS = [
    each.name for each in fields(CheckedModel) if each.name not in FUNCTION_FIELDS and each.name != "name"
]


@dataclass
class ReloadedModel:
    """A model that was saved and loaded again, or made anew and given the same weights."""

    module: nn.Module
    missing_keys: list[str] = field(default_factory=list)
    """Tensors of the model that were not in what was saved."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Tensors that were saved and found no place."""
    reference_logits: LogitsFunction | None = None
    """The logits of what was saved by another implementation."""
    no_reference_reason: str = ""
    """Why there is no other."""
    difference: Difference = field(default_factory=lambda: Difference(0.0, 0.0, ()))
    """How far its logits are from the model's."""
    rounded_constants: list[str] = field(default_factory=list)
    """Constants that are the fresh ones, rounded."""
    changed_constants: list[str] = field(default_factory=list)
    """Constants that are not what a fresh model has."""
    error: str = ""
    """What was raised in saving or loading, where that was impossible."""
    reference_difference: Difference | None = None
    """How far the other implementation's logits are from the model's."""
    find_divergent_layer: Callable[[nn.Module, Tensor, float], str | None] | None = None
    """Module, tokens, noise → where the other implementation parts from it first."""
    divergent_layer: str | None = None
