"""What is checked: a Transformer as a handful of functions it offers, and a few facts about it.

Each function is plain: tensors in, tensors out. For models of cutaway and of transformers they are found; for all
others they are keyword arguments of `ct.check`. What is not offered is not checked, and the report says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from cutaway.check.again import Again

Kind = Literal["decoder", "encoder", "encoder-decoder"]
Logits = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class Target:
    """Tokens are (B, T) integers, masks (B, T) booleans with True for real tokens, logits (B, T, V)."""

    name: str = "model"
    kind: Kind = "decoder"
    """Decoders see the past only, encoders both sides; of an encoder-decoder the decoder is checked, and its source."""

    # what it can be asked
    logits: Logits | None = None
    """tokens → logits."""
    padded: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → logits."""
    unplaced: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → logits, where `padded` tells positions too: here the mask alone must hide padding."""
    placed: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, positions (B, T) → logits."""
    packed: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, documents (B, T; 0, 0, 1, 1, 1 …) → logits, as if each document were alone."""
    cached: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None
    """tokens, state (None at first) → logits of these tokens, the state after them."""
    generate: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → the (B, n) tokens that follow, each the likeliest."""
    generate_padded: Callable[[Tensor, Tensor, int], Tensor] | None = None
    """tokens, mask, n → the same for texts padded on the left."""
    beams: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None
    """tokens (1, T), n, k → the k best (k, n) continuations, and their (k,) sums of log-probabilities."""
    sample: Callable[..., Tensor] | None = None
    """logits (V,), n → n tokens drawn from softmax(logits); it may take temperature=, top_k= and top_p= too."""
    speculate: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → the (B, n) tokens of speculative decoding at temperature 0."""
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, labels (the same tokens; -100 is not asked) → the mean loss, as training has it."""
    labelled: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, labels (as `loss` takes them) → the logits of that very pass."""
    accumulated: Callable[[Sequence[tuple[Tensor, Tensor]]], Tensor] | None = None
    """(tokens, labels) of each piece → the loss of all of them accumulated, as training has it."""
    patterns: Callable[[Tensor], Sequence[Tensor]] | None = None
    """tokens → each layer's attention (B, H, T, T)."""
    hidden: Callable[[Tensor], Sequence[Tensor]] | None = None
    """tokens → the stream (B, T, d) before, between and after the layers."""
    crossed: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None
    """source, source mask or None, tokens → logits."""
    balance: Callable[[Tensor, Tensor], Tensor] | None = None
    """tokens, mask → the loss that spreads tokens over experts."""
    attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """q (B, H, T, D), k, v (B, G, T, D) → (B, H, T, D)."""
    poisoned: Callable[[Tensor, float], Tensor] | None = None
    """tokens, value → logits of a cached pass in whose unused cache slots the value was written."""
    rolled: Callable[[Tensor, int], Tensor] | None = None
    """tokens, n → logits of a text read in pieces of n tokens, in a cache that keeps no more than a window."""
    kernels: Mapping[str, Logits] = field(default_factory=dict)
    """Names of attention kernels, and the logits by each."""
    variants: Callable[[], Mapping[str, Callable[[], Logits]]] | None = None
    """() → by the name of a setting: how to make the model with that setting changed, with the same weights; a
    ValueError is a refusal, which is as good. Under "" is what they are compared with, where it is not the model."""
    exported: Callable[[], Logits] | None = None
    """() → the logits of the model that was saved, and loaded again."""
    recomputed: Callable[[bool], None] | None = None
    """Switches activation checkpointing on and off."""
    against: Logits | None = None
    """The same model by another implementation."""
    make: Callable[[], nn.Module] | None = None
    """() → the module made anew from the same settings, with any weights."""
    reloaded: Callable[[], "Again"] | None = None
    """() → what was saved and loaded again, with what the loading said."""
    from_shapes: Callable[[], nn.Module] | None = None
    """() → the module made on the meta device and filled with these weights, as its own loading does it."""
    module: nn.Module | None = None

    # facts
    vocab: int | None = None
    longest: int | None = None
    """Tokens it can read."""
    window: int | None = None
    """Tokens that every layer's attention sees, itself included; None for all."""
    windows: tuple[int, ...] = ()
    """The windows of those layers that have one, each once."""
    layers: int | None = None
    tied: bool | None = None
    """Whether the head is the embedding's table."""
    scale: float | None = None
    """What q·k is multiplied by; 1/sqrt(d_head) where not given."""
    rope: Mapping[str, Any] | None = None
    """How q and k are turned, in the words of cutaway's configuration: theta, width, layout, scaling."""
    ordered: bool = True
    """Whether it has positions at all."""
    relative: bool | None = None
    """Whether only distances between positions count (RoPE, ALiBi), so that all may be shifted."""
    counted: bool | None = None
    """Whether `padded` numbers real tokens only, so that padding may stand on the left; None where not known."""
    pads_counted: bool = False
    """Whether positions are counted by the padding token (RoBERTa), so that padding must be just that."""
    source_vocab: int | None = None
    """Tokens of the source's own vocabulary, where it has one."""
    special: tuple[int, ...] = ()
    """Tokens with a meaning of their own (padding, ends), which are not drawn."""
    pad: int | None = None
    eos: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype | None = None
    trained: bool | None = None

    def offers(self) -> list[str]:
        """The names of what it can be asked."""
        return [name for name in OFFERS if getattr(self, name) is not None and getattr(self, name) != {}]

    def facts(self) -> dict[str, Any]:
        """What is known of it, in words and numbers."""
        known = {name: getattr(self, name) for name in FACTS}
        told = {name: str(value) if name in ("device", "dtype") else value for name, value in known.items()}
        return {name: value for name, value in told.items() if value is not None and value != ()}


OFFERS = [
    each.name
    for each in fields(Target)
    if "Callable" in str(each.type) or each.name in ("logits", "kernels", "module", "against")
]
FACTS = [each.name for each in fields(Target) if each.name not in OFFERS and each.name != "name"]
