"""`CheckedModel`: the functions and properties of a Transformer that the checks use; `ReloadedModel`.

Each function takes and returns tensors. The adapters set them for cutaway and transformers models; for other models
they are keyword arguments of `ct.check`. Checks whose functions are missing are skipped, and the report says so.
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


def require(value: T | None) -> T:
    """A function or property of the model that a check needs; checks without it are skipped."""
    assert value is not None
    return value


def count_parameters(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(param.numel() for param in module.parameters())


@dataclass(kw_only=True)
class CheckedModel:
    """Functions and properties of a model under test.

    Tokens are (B, T) integers, masks (B, T) booleans with True for real tokens, logits (B, T, V).
    """

    name: str = "model"
    kind: ModelKind = "decoder"
    """Decoders attend causally, encoders bidirectionally; checks of an encoder-decoder cover its decoder."""

    # functions
    logits: LogitsFunction | None = None
    """tokens → logits."""
    logits_with_mask: TokensFunction | None = None
    """tokens, mask → logits."""
    logits_with_mask_only: TokensFunction | None = None
    """tokens, mask → logits, if `logits_with_mask` passes position ids too: here only the mask excludes padding."""
    logits_with_positions: TokensFunction | None = None
    """tokens, positions (B, T) → logits."""
    logits_with_documents: TokensFunction | None = None
    """tokens, document ids (B, T; 0, 0, 1, 1, 1 …) → logits of packed documents, each as if alone."""
    logits_with_cache: CachedForward | None = None
    """tokens, cache (None at first) → logits of these tokens, updated cache."""
    generate: GenerateFunction | None = None
    """tokens, n → (B, n) new tokens by greedy decoding."""
    generate_padded: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """tokens, mask, n → (B, n) new tokens by greedy decoding of a left-padded batch."""
    beam_search: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    """tokens (1, T), n, k → the k best continuations (k, n) and their sums of log-probabilities (k,)."""
    sample: Callable[..., Tensor] | None = None
    """logits (V,), n → n samples from softmax(logits); may also take temperature=, top_k= and top_p=."""
    generate_speculative: GenerateFunction | None = None
    """tokens, n → (B, n) new tokens by speculative decoding at temperature 0."""
    loss: TokensFunction | None = None
    """tokens, labels (the same tokens, unshifted; -100 is ignored) → mean training loss."""
    logits_with_labels: TokensFunction | None = None
    """tokens, labels (as for `loss`) → logits of the forward pass that computes the loss."""
    accumulated_loss: Callable[[Sequence[tuple[Tensor, Tensor]]], Tensor] | None = None
    """(tokens, labels) per micro-batch → training loss with gradient accumulation."""
    logits_with_source: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """source, source mask or None, tokens → logits."""
    load_balancing_loss: TokensFunction | None = None
    """tokens, mask → load-balancing loss of a mixture of experts."""
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """q (B, H, T, D), k, v (B, G, T, D) → (B, H, T, D)."""
    logits_with_filled_cache: Callable[[Tensor, float], Tensor] | None = None
    """tokens, value → logits of a cached forward pass whose unused cache slots hold the value."""
    logits_with_rolling_cache: GenerateFunction | None = None
    """tokens, n → logits of a prefill in chunks of n tokens, with a rolling cache of one sliding window."""
    logits_by_kernel: Mapping[str, LogitsFunction] = field(default_factory=dict)
    """Name of an attention kernel → logits function with that kernel."""
    config_variants: Callable[[], ConfigVariants] | None = None
    """() → name of a config field → function that builds the model with that field changed and the same weights; a
    ValueError means that the value is rejected, which passes. The key "" is the baseline if that is not the model."""
    reload_logits: Callable[[], LogitsFunction] | None = None
    """() → logits function of the model after saving and loading."""
    set_activation_checkpointing: Callable[[bool], None] | None = None
    """Enables or disables activation checkpointing."""
    reference_logits: LogitsFunction | None = None
    """tokens → logits of the same model in another implementation."""
    build_module: Callable[[], nn.Module] | None = None
    """() → a new module with the same configuration and any weights."""
    reload: Callable[[], "ReloadedModel"] | None = None
    """() → the model after saving and loading, with the missing and unexpected keys."""
    load_from_meta: Callable[[], nn.Module] | None = None
    """() → a module built on the meta device and loaded with these weights by its own loading code."""
    module: nn.Module | None = None

    # properties
    vocab_size: int | None = None
    max_seq_len: int | None = None
    """Maximum sequence length."""
    window: int | None = None
    """Sliding window of every layer in tokens, the query's own included; None for full attention or mixed layers."""
    windows: tuple[int, ...] = ()
    """The distinct sliding windows of the layers that have one."""
    num_layers: int | None = None
    tied_embeddings: bool | None = None
    """Whether the output head shares the embedding matrix."""
    attention_scale: float | None = None
    """Factor on q·k; default 1/sqrt(d_head)."""
    rope: Mapping[str, object] | None = None
    """RoPE parameters with the field names of cutaway's configuration: theta, rotary_dim, layout, scaling."""
    has_positions: bool = True
    """Whether the model has any position encoding."""
    relative_positions: bool | None = None
    """Whether only relative positions matter (RoPE, ALiBi), so that shifting all positions changes nothing."""
    positions_skip_padding: bool | None = None
    """Whether `logits_with_mask` numbers only real tokens, so that left padding is supported; None if unknown."""
    positions_from_pad_token: bool = False
    """Whether positions are derived from the pad token id (RoBERTa), so that padding must use that token."""
    source_vocab_size: int | None = None
    """Size of the source vocabulary, if it is a separate one."""
    special_token_ids: tuple[int, ...] = ()
    """Special tokens (padding, end of sequence), which are not drawn as random tokens."""
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    trained: bool | None = None

    def available_functions(self) -> list[str]:
        """Names of the functions that are set."""
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
    """A model after saving and loading, or a rebuilt one with the same weights, compared with the original."""

    module: nn.Module
    missing_keys: list[str] = field(default_factory=list)
    """Tensors of the model that are not in the checkpoint."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Tensors in the checkpoint that the model does not have."""
    reference_logits: LogitsFunction | None = None
    """tokens → logits of the checkpoint in another implementation."""
    no_reference_reason: str = ""
    """Why there is no reference implementation."""
    difference: Difference = field(default_factory=lambda: Difference(0.0, 0.0, ()))
    """Difference of its logits from the original model's."""
    rounded_constants: list[str] = field(default_factory=list)
    """Constants of the original that equal the rebuilt ones rounded to bf16 or fp16."""
    changed_constants: list[str] = field(default_factory=list)
    """Constants of the original that differ from the rebuilt ones otherwise."""
    error: str = ""
    """The exception raised by saving or loading, if any."""
    reference_difference: Difference | None = None
    """Difference of the reference implementation's logits from the model's."""
    find_divergent_layer: Callable[[nn.Module, Tensor, float], str | None] | None = None
    """module, tokens, noise ratio → the first layer whose output differs from the reference implementation's."""
    divergent_layer: str | None = None
