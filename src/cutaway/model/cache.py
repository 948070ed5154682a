"""The KV cache: keys and values of every layer, and the position of each slot, from which the mask follows."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model.masks import EMPTY, INTEGERS, Places

Widths = tuple[tuple[int, int], tuple[int, int]]
"""(heads, width) of what a layer keeps as keys, and as values."""


class LayerCache:
    """One layer's keys and values in fixed buffers: (batch, slot, head, width)."""

    def __init__(self, batch: int, slots: int, widths: Widths, device: torch.device, dtype: torch.dtype) -> None:
        self.k, self.v = (torch.zeros(batch, slots, *width, device=device, dtype=dtype) for width in widths)

    def write(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], slot: Int[Tensor, "B T"], span: int
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        """Store the new tokens and return all the layer has seen."""
        row = torch.arange(len(k), device=k.device).unsqueeze(-1)
        self.k[row, slot] = k.to(self.k.dtype)
        self.v[row, slot] = v.to(self.v.dtype)
        return self.k[:, :span].to(k.dtype), self.v[:, :span].to(v.dtype)


class CrossCache:
    """One layer's keys and values of the encoder's memory, computed once."""

    k: Tensor | None = None
    v: Tensor | None = None


class Cache:
    """What a decoder has read. A row's token at position p stands in slot p; `position` says which slots are filled.

    Padding takes the slots behind its row's last token, marked empty and overwritten by the next tokens. So rows of
    different lengths, padding on either side, prompts in chunks and steps taken back need no case of their own.
    """

    def __init__(
        self, widths: Sequence[Widths], batch: int, slots: int, *, cross: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.batch, self.slots, self.widths = batch, slots, list(widths)
        self.layers = [LayerCache(batch, slots, width, device, dtype) for width in widths]
        self.cross = [CrossCache() for _ in widths] if cross else None
        self.memory: Places | None = None
        self.position = torch.full((batch, slots), EMPTY, device=device)
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        self.used = 0
        """No row is longer than this."""
        self.least = 0
        """No row is shorter than this."""
        self.span = 0
        """How many slots attention looks at."""
        self.fixed = False
        """Always attend over all slots, so that every step has the same shapes (for CUDA graphs and compiled steps)."""

    def place(
        self, length: int, mask: Bool[Tensor, "B T"] | None
    ) -> tuple[Places, Places, Int[Tensor, "B T"], Int[Tensor, "B S"]]:
        """Places of `length` new tokens a row and of all keys then, the new ones' slots, and what `commit` takes."""
        if self.used + length > self.slots and not torch.compiler.is_compiling():
            self.used = int(self.length.max())  # the count is of the longest a row could be; now look
        if self.used + length > self.slots and not torch.compiler.is_compiling():
            raise InputError(
                f"the cache has {self.slots} slots, {self.used} of them used, and {length} more tokens do not fit;"
                " make it longer with model.new_cache(batch, length)"
            )
        index = torch.arange(length, device=self.position.device).expand(self.batch, length)
        if mask is not None:
            index = torch.where(mask, mask.cumsum(-1) - 1, mask.sum(-1, keepdim=True) + (~mask).cumsum(-1) - 1)
        slot = self.length.unsqueeze(-1) + index
        new = Places(slot if mask is None else torch.where(mask, slot, EMPTY), plain=mask is None and self.used == 0)
        position = self.position.scatter(1, slot, new.position)
        self.span = self.slots if self.fixed else self.used + length
        keys = Places(position[:, : self.span], plain=new.plain and not self.fixed)
        return new, keys, slot, position

    def commit(self, new: Places, position: Int[Tensor, "B S"], *, padded: bool) -> None:
        """Count the new tokens as read. Until then a step that failed can be taken again."""
        length = new.position.shape[-1]
        self.position.copy_(position)
        self.length = self.length + (new.position >= 0).sum(-1)
        self.used += length
        if not padded:
            self.least += length
        elif length > 1 and not torch.compiler.is_compiling():
            self.least = int(self.length.min())

    def rewind(self, length: int | Int[Tensor, " B"]) -> None:
        """Forget every token from position `length` on (of each row, if given for each)."""
        whole = isinstance(length, int) and not isinstance(length, bool)
        if not whole and not (isinstance(length, Tensor) and length.dtype in INTEGERS):
            raise InputError(
                f"length is {length!r}; give the number of tokens to keep, as an integer or one for each row"
            )
        kept = torch.as_tensor(length, device=self.length.device)
        if bool((kept < 0).any()):
            raise InputError(f"length is {int(kept.min())}; give the number of tokens to keep, 0 or more")
        if kept.shape not in ((), self.length.shape):
            raise InputError(
                f"length has shape {tuple(kept.shape)}; give one number, or one for each of {self.batch} rows"
            )
        self.length = torch.minimum(self.length, kept)
        self.position.masked_fill_(self.position >= self.length.unsqueeze(-1), EMPTY)
        self.least = min(self.least, length) if isinstance(length, int) else 0
        if isinstance(length, int):
            self.used = min(self.used, length)
