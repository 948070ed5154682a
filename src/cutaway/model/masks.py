"""Who sees whom: rules over the positions of queries and keys, drawn as a mask only when a kernel needs one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
EMPTY = -1
"""The position of what is no token: padding, or a cache slot that nothing was written to."""


class Spot(NamedTuple):
    """One token, or a broadcastable array of them, as the rules see it."""

    position: Int[Tensor, "..."]
    document: Int[Tensor, "..."] | None = None
    prefix: Int[Tensor, "..."] | None = None


Rule = Callable[[Spot, Spot], Bool[Tensor, "..."]]
"""(query, key) → may the query see the key?"""


def filled(q: Spot, k: Spot) -> Bool[Tensor, "..."]:
    """There is a token to see."""
    return k.position >= 0


def causal(q: Spot, k: Spot) -> Bool[Tensor, "..."]:
    """Itself and what came before."""
    return k.position <= q.position


def within(window: int) -> Rule:
    """Less than `window` positions away."""
    return lambda q, k: (q.position - k.position).abs() < window


def prefix_or_causal(q: Spot, k: Spot) -> Bool[Tensor, "..."]:
    """The whole prefix, and then what came before."""
    assert q.prefix is not None
    return (k.position < q.prefix) | causal(q, k)


def same_document(q: Spot, k: Spot) -> Bool[Tensor, "..."]:
    """Packed texts do not see each other."""
    return q.document == k.document  # type: ignore[return-value]  # tensors, whose == is a tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a batch stand. One row serves all rows when they are alike."""

    position: Int[Tensor, "#B T"]
    document: Int[Tensor, "#B T"] | None = None
    prefix: Int[Tensor, "#B 1"] | None = None
    plain: bool = False
    """Known without looking: positions 0, 1, 2 …, nothing padded, one document, no prefix."""

    def length(self) -> Int[Tensor, "#B #T"]:
        """How many tokens the sequence has that each token belongs to."""
        if self.document is None:
            return self.position.amax(-1, keepdim=True) + 1
        together = self.document.unsqueeze(-1) == self.document.unsqueeze(-2)
        return torch.where(together, self.position.unsqueeze(-2), EMPTY).amax(-1) + 1

    def at(self, row: Tensor, index: Tensor) -> Spot:
        """One token, as the rules see it."""
        row = row if len(self.position) > 1 else row * 0
        document = None if self.document is None else self.document[row, index]
        return Spot(self.position[row, index], document, None if self.prefix is None else self.prefix[row, 0])

    def along(self, axis: int) -> Spot:
        """All tokens, along one axis of a (B, T, S) mask."""
        document = None if self.document is None else self.document.unsqueeze(-axis)
        return Spot(
            self.position.unsqueeze(-axis), document, None if self.prefix is None else self.prefix.unsqueeze(-1)
        )


def places(
    batch: int,
    length: int,
    device: torch.device,
    mask: Bool[Tensor, "B T"] | None = None,
    documents: Int[Tensor, "B T"] | None = None,
    prefix: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
) -> Places:
    """Number the real tokens of each row, and of each document in it, from 0: padding on any side shifts nothing."""
    alike = mask is None and documents is None and prefix is None
    count = torch.arange(length, device=device).expand(1 if alike else batch, length)
    if mask is not None:
        count = mask.cumsum(-1) - 1
    if documents is not None:
        new = torch.ones_like(documents, dtype=torch.bool)
        new[:, 1:] = documents[:, 1:] != documents[:, :-1]
        documents = new.cumsum(-1)  # a number that comes again later is another text
        start = torch.where(new, count if mask is None else count + (~mask).long(), 0).cummax(-1).values
        count = count - start
    if positions is not None:
        count = positions
    if mask is not None:
        count = torch.where(mask, count, EMPTY)
    return Places(count, documents, None if prefix is None else prefix.unsqueeze(-1), alike and positions is None)


@dataclass(frozen=True)
class View:
    """What one kind of layer sees: the rules that hold between its queries and keys."""

    q: Places
    k: Places
    rules: tuple[Rule, ...]
    shape: str | None
    """'all' or 'causal' when the mask is known to be just that, so that no kernel need draw it."""

    def visible(self) -> tuple[Bool[Tensor, "B 1 T S"], Bool[Tensor, "B 1 T 1"]]:
        """The mask, True where a query sees a key, and the queries that see nothing at all.

        Those are shown everything, to keep softmax finite; the kernel sets what they read to zero.
        """
        seen = self.sees(self.q.along(1), self.k.along(2))
        seen = seen.expand(-1, self.q.position.shape[-1], -1)
        blind = ~seen.any(-1, keepdim=True)
        return (seen | blind).unsqueeze(1), blind.unsqueeze(1)

    def sees(self, q: Spot, k: Spot) -> Bool[Tensor, "..."]:
        """All the rules at once."""
        return reduce(torch.logical_and, (rule(q, k) for rule in self.rules))


def view(q: Places, k: Places, *, is_causal: bool, window: int | None = None) -> View:
    """Self-attention's rules: filled, causal (with a prefix, if there is one), within the window, in one document."""
    rules: list[Rule] = [filled]
    if is_causal:
        rules.append(causal if q.prefix is None else prefix_or_causal)
    if window is not None:
        rules.append(within(window))
    if q.document is not None:
        rules.append(same_document)
    length = k.position.shape[-1]
    narrow = window is not None and window < length
    plain = q.plain and k.plain and not narrow and (not is_causal or q.position.shape[-1] == length)
    return View(q, k, tuple(rules), ("causal" if is_causal else "all") if plain else None)


def view_of_memory(q: Places, k: Places) -> View:
    """Cross-attention's only rule: the source token is real."""
    return View(q, k, (filled,), "all" if k.plain else None)
