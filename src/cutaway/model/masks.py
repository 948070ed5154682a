"""Attention masks as composable rules over token positions, materialized only if a kernel needs a dense mask."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

EMPTY_POSITION = -1
"""Position of padding and of unwritten cache slots."""


class TokenInfo(NamedTuple):
    """What a mask rule reads about a query or a key: scalars for one token, or tensors that broadcast for many."""

    position: Int[Tensor, "..."]
    document_id: Int[Tensor, "..."] | None = None
    prefix_length: Int[Tensor, "..."] | None = None


MaskRule = Callable[[TokenInfo, TokenInfo], Bool[Tensor, "..."]]
"""(query, key) → True where the query attends to the key."""


def padding_mask(q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
    """True where the key is a token, not padding."""
    return k.position >= 0


def causal_mask(q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
    """True where the key is at or before the query."""
    return k.position <= q.position


class SlidingWindowMask(NamedTuple):
    """True where the key is less than `window` positions from the query."""

    window: int

    def __call__(self, q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
        return (q.position - k.position).abs() < self.window


def prefix_lm_mask(q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
    """True where the key is in the prefix, or at or before the query."""
    assert q.prefix_length is not None
    return (k.position < q.prefix_length) | causal_mask(q, k)


def document_mask(q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
    """True where query and key are in the same document of a packed sequence."""
    return q.document_id == k.document_id  # type: ignore[return-value]  # == of tensors is a tensor


def all_rules_hold(rules: Iterable[MaskRule], q: TokenInfo, k: TokenInfo) -> Bool[Tensor, "..."]:
    """Whether the query attends to the key under all rules."""
    return reduce(torch.logical_and, (rule(q, k) for rule in rules))


@dataclass(frozen=True)
class TokenPositions:
    """Position, document and prefix length of each token of a batch. One row is broadcast if all rows are equal."""

    position: Int[Tensor, "#B T"]
    document_id: Int[Tensor, "#B T"] | None = None
    prefix_length: Int[Tensor, "#B 1"] | None = None
    is_sequential: bool = False
    """True if positions are known to be 0, 1, 2 … without reading values (no padding, one document, no prefix)."""
    limit: int | None = None
    """Exclusive upper bound of the positions, where it is known without reading values."""

    def sequence_length(self) -> Int[Tensor, "#B #T"]:
        """Length of the sequence, or of the document, that each token belongs to."""
        if self.document_id is None:
            return self.position.amax(-1, keepdim=True) + 1
        same_document = self.document_id.unsqueeze(-1) == self.document_id.unsqueeze(-2)  # (B, T, T)
        return torch.where(same_document, self.position.unsqueeze(-2), EMPTY_POSITION).amax(-1) + 1

    def get_token(self, row: Tensor, index: Tensor) -> TokenInfo:
        """Inputs of a mask rule for the token at [row, index]; flex attention passes these indices as tensors."""
        row = row if len(self.position) > 1 else row * 0  # all rows are equal, and only one is stored
        document = None if self.document_id is None else self.document_id[row, index]
        prefix = None if self.prefix_length is None else self.prefix_length[row, 0]
        return TokenInfo(self.position[row, index], document, prefix)

    def broadcast_along(self, axis: int) -> TokenInfo:
        """Inputs of a mask rule for all tokens, which are placed along `axis` of a (B, T, S) mask."""
        document = None if self.document_id is None else self.document_id.unsqueeze(-axis)
        prefix = None if self.prefix_length is None else self.prefix_length.unsqueeze(-1)
        return TokenInfo(self.position.unsqueeze(-axis), document, prefix)


def number_tokens(
    batch_size: int,
    seq_len: int,
    device: torch.device,
    mask: Bool[Tensor, "B T"] | None = None,
    document_ids: Int[Tensor, "B T"] | None = None,
    prefix_lengths: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
) -> TokenPositions:
    """Number the tokens of each row from 0, and again from 0 in each document. Padding is not counted.

    If `positions` is given, these positions are used instead.
    """
    equal_rows = mask is None and document_ids is None and prefix_lengths is None
    position = torch.arange(seq_len, device=device).expand(1 if equal_rows else batch_size, seq_len)
    if mask is not None:
        position = mask.cumsum(-1) - 1
    if document_ids is not None:
        is_start = torch.ones_like(document_ids, dtype=torch.bool)
        is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        document_ids = is_start.cumsum(-1)  # an id that occurs again later is another document
        start = torch.where(is_start, position if mask is None else position + (~mask).long(), 0).cummax(-1).values
        position = position - start
    if positions is not None:
        position = positions
    if mask is not None:
        position = torch.where(mask, position, EMPTY_POSITION)
    prefix = None if prefix_lengths is None else prefix_lengths.unsqueeze(-1)
    if positions is not None:
        return TokenPositions(position, document_ids, prefix)
    return TokenPositions(position, document_ids, prefix, is_sequential=equal_rows, limit=seq_len)


@dataclass(frozen=True)
class MaskSpec:
    """An attention mask: query and key positions, and the rules that must all hold between them."""

    q: TokenPositions
    k: TokenPositions
    rules: tuple[MaskRule, ...]
    structure: str | None
    """'full' or 'causal' if the mask is known to be exactly that, so that no kernel has to materialize it."""

    def to_dense(self) -> tuple[Bool[Tensor, "B 1 T S"], Bool[Tensor, "B 1 T 1"]]:
        """Return the dense mask (True: the query attends to the key), and which queries attend to no key.

        The rows of fully masked queries are set to True to keep softmax finite; kernels set their outputs to zero.
        """
        visible = all_rules_hold(self.rules, self.q.broadcast_along(1), self.k.broadcast_along(2))
        visible = visible.expand(-1, self.q.position.shape[-1], -1)
        fully_masked = ~visible.any(-1, keepdim=True)
        return (visible | fully_masked).unsqueeze(1), fully_masked.unsqueeze(1)


def self_attention_mask(
    q: TokenPositions, k: TokenPositions, *, is_causal: bool, window: int | None = None
) -> MaskSpec:
    """Return the mask of self-attention, with all rules that apply: padding, causal or prefix LM, window, document."""
    rules: list[MaskRule] = [padding_mask]
    if is_causal:
        rules.append(causal_mask if q.prefix_length is None else prefix_lm_mask)
    if window is not None:
        rules.append(SlidingWindowMask(window))  # type: ignore[arg-type]  # mypy ignores __call__ of a NamedTuple
    if q.document_id is not None:
        rules.append(document_mask)
    length = k.position.shape[-1]
    window_hides = window is not None and window < length
    is_square = q.position.shape[-1] == length
    is_plain = q.is_sequential and k.is_sequential and not window_hides and (not is_causal or is_square)
    return MaskSpec(q, k, tuple(rules), ("causal" if is_causal else "full") if is_plain else None)


def cross_attention_mask(q: TokenPositions, k: TokenPositions) -> MaskSpec:
    """Return the mask of cross-attention, which hides only the padding of the encoder input."""
    return MaskSpec(q, k, (padding_mask,), "full" if k.is_sequential else None)
