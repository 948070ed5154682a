"""`CheckedModel`: the functions and properties of a Transformer that the checks use. `ReloadedModel`: a saved model.

Most functions take and return tensors. The adapters set the functions for cutaway and transformers models. For other
models, users pass them as keyword arguments of `ct.check`. Checks that need a missing function are skipped, and the
report says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from cutaway.check.numerics import Difference

T = TypeVar("T")
ModelKind = Literal["decoder", "encoder", "encoder-decoder"]
LogitsFunction = Callable[[Tensor], Tensor]
ConfigVariants = Mapping[str, Callable[[], LogitsFunction]]
GenerateFunction = Callable[[Tensor, int], Tensor]
CachedForward = Callable[[Tensor, Any], tuple[Tensor, Any]]
TokensFunction = Callable[[Tensor, Tensor], Tensor]
"""tokens and a second tensor (mask, positions, labels …) → logits or loss."""
TensorsFunction = Callable[[Tensor], Sequence[Tensor]]
"""tokens → one tensor per layer."""


def require(value: T | None) -> T:
    """Return a field of `CheckedModel` that must not be None. Checks whose required fields are None do not run."""
    assert value is not None
    return value


def count_parameters(module: nn.Module) -> int:
    """Number of elements of all parameters of a module."""
    return sum(param.numel() for param in module.parameters())


@dataclass(kw_only=True)
class CheckedModel:
    """Functions and properties of a model under test.

    Tokens are integers (B, T). Masks are booleans (B, T), True for real tokens. Logits are (B, T, V).
    """

    name: str = "model"
    kind: ModelKind = "decoder"
    """A decoder attends causally, an encoder bidirectionally. For an encoder-decoder, which is the default with
    `logits_with_source`, most checks test the decoder."""

    # functions
    logits: LogitsFunction | None = None
    """tokens → logits."""
    logits_with_mask: TokensFunction | None = None
    """tokens, mask → logits."""
    logits_with_mask_only: TokensFunction | None = None
    """tokens, mask → logits, without passing position ids. Only needed if `logits_with_mask` passes position ids."""
    logits_with_positions: TokensFunction | None = None
    """tokens, positions (B, T) → logits."""
    logits_with_documents: TokensFunction | None = None
    """tokens, document ids (B, T) such as 0, 0, 1, 1, 1 → logits of packed documents.
    The logits of each document must be the same as if it were alone."""
    logits_with_cache: CachedForward | None = None
    """tokens, cache (None at first) → logits of these tokens, updated cache."""
    logits_with_padded_cache: Callable[[Tensor, Tensor, Any], tuple[Tensor, Any]] | None = None
    """tokens, mask of the cached and the new tokens, cache (None at first) → logits of these tokens, updated cache.
    The first call gets a left-padded batch."""
    generate: GenerateFunction | None = None
    """tokens, n → (B, n) new tokens by greedy decoding; the prompt may precede them."""
    generate_padded: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """tokens, mask, n → (B, n) new tokens by greedy decoding of a padded batch; see `padding_side`."""
    beam_search: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    """tokens (1, T), n, k → the k best continuations of n tokens (k, n), and their summed log-probabilities (k,)."""
    sample: Callable[..., Tensor] | None = None
    """logits (V,), n → n samples from softmax(logits); may also take temperature=, top_k= and top_p=."""
    generate_speculative: GenerateFunction | None = None
    """tokens, n → (B, n) new tokens by speculative decoding at temperature 0."""
    loss: TokensFunction | None = None
    """tokens, labels (the same tokens, not shifted) → mean training loss. Labels of -100 are ignored."""
    logits_with_labels: TokensFunction | None = None
    """tokens, labels (as for `loss`) → logits of the forward pass that computes the loss."""
    accumulated_loss: Callable[[Sequence[tuple[Tensor, Tensor]]], Tensor] | None = None
    """one (tokens, labels) pair per micro-batch → training loss with gradient accumulation."""
    logits_with_source: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """source tokens, source mask or None, decoder tokens → logits of an encoder-decoder."""
    load_balancing_loss: TokensFunction | None = None
    """tokens, mask → load-balancing loss of a mixture of experts."""
    hidden_states: TensorsFunction | None = None
    """tokens → residual stream (B, T, d) before the first block and after each block. Only needed for a function
    without a `module`, such as a JAX model."""
    attentions: TensorsFunction | None = None
    """tokens → attention pattern (B, H, T, T) of each layer, after the softmax. Only needed for a function whose
    attention is not computed by PyTorch."""
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """q (B, H, T, D), k and v (B, G, T, D) with G kv heads → attention output (B, H, T, D)."""
    logits_with_filled_cache: Callable[[Tensor, float], Tensor] | None = None
    """tokens, value → logits of a forward pass with a cache whose unused slots are filled with the value."""
    logits_with_rolling_cache: GenerateFunction | None = None
    """tokens, n → logits of a prefill in chunks of n tokens, with a rolling cache that holds one sliding window."""
    logits_by_kernel: Mapping[str, LogitsFunction] = field(default_factory=dict)
    """Name of an attention kernel → logits function with that kernel."""
    config_variants: Callable[[], ConfigVariants] | None = None
    """() → dict from the name of a config field to a function that changes this field, builds the model with the same
    weights, and returns its logits function. A ValueError means that the model rejects the changed value, which passes
    the check. The optional key "" builds the baseline; without it, the baseline is the model itself."""
    reload_logits: Callable[[], LogitsFunction] | None = None
    """() → logits function of the model after saving and loading."""
    set_activation_checkpointing: Callable[[bool], None] | None = None
    """True or False → None; enables or disables activation checkpointing in the model."""
    reference_logits: LogitsFunction | None = None
    """tokens → logits of the same model in another implementation."""
    build_module: Callable[[], nn.Module] | None = None
    """() → a new module with the same configuration and any weights."""
    reload: Callable[[], "ReloadedModel"] | None = None
    """() → the model after saving and loading, with the missing and unexpected keys."""
    load_from_meta: Callable[[], nn.Module] | None = None
    """() → the model built on the meta device, then loaded with the same weights by the model's own loading code."""
    module: nn.Module | None = None

    # properties
    vocab_size: int | None = None
    max_seq_len: int | None = None
    """Maximum sequence length."""
    multiple: int | None = None
    """Number of which sequence lengths must be a multiple, as in block-sparse attention. Other lengths are padded on
    the right, in an encoder with a mask."""
    window: int | None = None
    """Sliding window of all layers: the number of visible tokens, including the query's own. None if a layer has full
    attention, or if the windows of the layers differ."""
    windows: tuple[int, ...] = ()
    """The distinct sliding windows of the layers that have one."""
    num_layers: int | None = None
    tied_embeddings: bool | None = None
    """Whether the output head shares the embedding matrix."""
    attention_scale: float | None = None
    """Factor that q·k is multiplied by; None means 1/sqrt(d_head). If it is None, and the configuration is unknown,
    another factor is only a warning."""
    kv_heads: int | None = None
    """Number of heads of k and v, each used by adjacent heads of q. If it is None, an unusual grouping is only a
    warning."""
    rope: Mapping[str, object] | None = None
    """RoPE parameters with the field names of cutaway's configuration: theta, rotary_dim, layout, scaling."""
    has_positions: bool = True
    """Whether the model has any position encoding."""
    relative_positions: bool | None = None
    """Whether only relative positions matter (RoPE, ALiBi), so that shifting all positions changes nothing."""
    positions_skip_padding: bool | None = None
    """Whether `logits_with_mask` numbers only real tokens, so that left padding is supported; None if unknown."""
    padding_side: Literal["left", "right", "both"] | None = None
    """Side of the padding that `generate_padded` supports. If it is None, left padding must work, and wrong tokens with
    right padding are a warning. With "right", `logits_with_mask` need not support left padding either."""
    positions_from_pad_token: bool = False
    """Whether positions are derived from the pad token id (RoBERTa), so that padding must use that token."""
    source_vocab_size: int | None = None
    """Size of the source vocabulary, if the model has a separate one."""
    special_token_ids: tuple[int, ...] = ()
    """Special tokens (padding, end of sequence), which are not drawn as random tokens."""
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    trained: bool | None = None
    """Whether the model is trained; None if unknown. The check initial-loss is for untrained models only."""

    def supported_length(self, length: int) -> int:
        """The smallest supported sequence length of at least `length`; see `multiple`."""
        can_pad = self.kind != "encoder" or self.logits_with_mask is not None
        return length if self.multiple is None or can_pad else length + -length % self.multiple

    def available_functions(self) -> list[str]:
        """Names of the function fields, including `module`, that are set."""
        return [name for name in FUNCTION_FIELDS if getattr(self, name) is not None and getattr(self, name) != {}]

    def properties(self) -> dict[str, object]:
        """The known properties, as JSON-compatible values."""
        known = {name: getattr(self, name) for name in PROPERTY_FIELDS}
        known = {name: value for name, value in known.items() if value is not None and value != ()}
        return {name: str(value) if name in ("device", "dtype") else value for name, value in known.items()}


_FIELDS = {entry.name: str(entry.type) for entry in fields(CheckedModel)}
FUNCTION_FIELDS = [name for name, type_name in _FIELDS.items() if "Callable" in type_name or name == "module"]
PROPERTY_FIELDS = [name for name in _FIELDS if name not in (*FUNCTION_FIELDS, "name")]


@dataclass
class ReloadedModel:
    """A model after saving and loading, or rebuilt with the same weights, and its comparison with the original."""

    module: nn.Module
    missing_keys: list[str] = field(default_factory=list)
    """Names of tensors of the model that are not in the checkpoint."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Names of tensors in the checkpoint that the model does not have."""
    reference_logits: LogitsFunction | None = None
    """tokens → logits of the checkpoint in another implementation."""
    no_reference_reason: str = ""
    """Why there is no reference implementation."""
    difference: Difference = field(default_factory=lambda: Difference(0.0, 0.0, ()))
    """Difference between the logits of the original and of the reloaded model."""
    rounded_constants: list[str] = field(default_factory=list)
    """Names of constant tensors whose values in the original model are the reloaded values, rounded to bf16 or fp16.

    Constant tensors are non-persistent buffers and frozen parameters.
    """
    changed_constants: list[str] = field(default_factory=list)
    """Names of constant tensors whose values differ between the two models, but not by rounding to bf16 or fp16."""
    error: str = ""
    """The exception raised by saving or loading, if any."""
    reference_difference: Difference | None = None
    """Difference between the logits of the model and of the reference implementation."""
    find_divergent_layer: Callable[[nn.Module, Tensor, float], str | None] | None = None
    """module, tokens, noise ratio → the first layer whose output differs from the reference implementation's."""
    divergent_layer: str | None = None
    """Result of `find_divergent_layer`, if the logits differ from those of the reference implementation."""
