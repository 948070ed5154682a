"""The KV cache: keys and values of every layer, in slots whose positions follow from how much each row has read."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.model.masks import EMPTY, INTEGERS, Places

Widths = tuple[tuple[int, int], tuple[int, int]]
"""(heads, width) of what a layer keeps as keys, and as values."""


class Step(NamedTuple):
    """New tokens on their way into the layers that have the same number of slots."""

    slot: Int[Tensor, "B T"]
    keys: Places
    """Of the slots that are looked at, the first `span`."""
    span: int


class LayerCache:
    """One layer's keys and values in fixed buffers: (batch, slot, head, width)."""

    def __init__(self, batch: int, slots: int, widths: Widths, device: torch.device, dtype: torch.dtype) -> None:
        self.slots = slots
        self.k, self.v = (torch.zeros(batch, slots, *width, device=device, dtype=dtype) for width in widths)

    def write(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], step: Step
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        """Store the new tokens and return all the layer has seen."""
        row = torch.arange(len(k), device=k.device).unsqueeze(-1)
        self.k[row, step.slot] = k.to(self.k.dtype)
        self.v[row, step.slot] = v.to(self.v.dtype)
        return self.k[:, : step.span].to(k.dtype), self.v[:, : step.span].to(v.dtype)

    def select(self, rows: Int[Tensor, " B"]) -> None:
        self.k, self.v = self.k[rows], self.v[rows]


class CrossCache:
    """One layer's keys and values of the encoder's memory, computed once."""

    k: Tensor | None = None
    v: Tensor | None = None

    def select(self, rows: Int[Tensor, " B"]) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


MakeLayer = Callable[[int, int, Widths, torch.device, torch.dtype], LayerCache]


class Cache:
    """What a decoder has read: `length` tokens of each row. The token at position p stands in slot p, or p modulo the
    number of slots in a ring; so a slot's position follows from the row's length, and the mask from the positions.

    Padding takes the slots behind its row's last token, to be overwritten by the next tokens. So rows of different
    lengths, padding on either side, prompts in chunks and steps taken back need no case of their own.
    """

    def __init__(
        self,
        widths: Sequence[Widths],
        batch: int,
        slots: int,
        *,
        windows: Sequence[int | None],
        cross: bool,
        device: torch.device,
        dtype: torch.dtype,
        chunk: int | None = None,
        make_layer: MakeLayer = LayerCache,
    ) -> None:
        """With a `chunk`, a layer that sees a window keeps just that and what a step of `chunk` tokens brings."""
        self.batch, self.slots, self.widths, self.chunk = batch, slots, list(widths), chunk
        room = [slots if window is None or chunk is None else min(slots, window + chunk - 1) for window in windows]
        self.layers = [make_layer(batch, n, width, device, dtype) for n, width in zip(room, widths, strict=True)]
        self.rings = sorted({(n, w) for n, w in zip(room, windows, strict=True) if w is not None and n < slots})
        """(slots, window) of layers that forget."""
        self.cross = [CrossCache() for _ in widths] if cross else None
        self.memory: Places | None = None
        self.length = torch.zeros(batch, dtype=torch.long, device=device)
        self.reach = torch.zeros_like(self.length)
        """Where each row's furthest write ended, of padding and of tokens taken back too."""
        self.used = 0
        """No row is longer than this."""
        self.least = 0
        """No row is shorter than this."""
        self.fixed = False
        """Always attend over all slots, so that every step has the same shapes (for CUDA graphs and compiled steps)."""

    def place(self, length: int, mask: Bool[Tensor, "B T"] | None) -> tuple[Places, dict[int, Step]]:
        """Places of `length` new tokens a row; and for layers with so many slots, where they go and what is seen."""
        if not torch.compiler.is_compiling():
            self.check_room(length)
        index = torch.arange(length, device=self.length.device).expand(self.batch, length)
        end = self.length + length
        if mask is not None:
            count = mask.sum(-1)
            if length > 1:
                index = torch.where(mask, mask.cumsum(-1) - 1, count.unsqueeze(-1) + (~mask).cumsum(-1) - 1)
            end = self.length + count
        position = self.length.unsqueeze(-1) + index
        new = Places(
            position if mask is None else torch.where(mask, position, EMPTY), plain=mask is None and self.used == 0
        )
        steps = {}
        for slots in {layer.slots for layer in self.layers}:
            span = slots if self.fixed else min(slots, self.used + length)
            last = end.unsqueeze(-1) - 1
            held = last - (last - torch.arange(span, device=end.device)) % slots  # the last position that fell there
            keys = Places(held.clamp(min=EMPTY), plain=new.plain and span == length)
            steps[slots] = Step(position % slots, keys, span)
        return new, steps

    def check_room(self, length: int) -> None:
        """The new tokens must fit."""
        if self.used + length > self.slots:
            self.used = int(self.length.max())  # the count is of the longest a row could be; now look
        if self.used + length > self.slots:
            raise InputError(
                f"the cache has {self.slots} slots, {self.used} of them used, and {length} more tokens do not fit;"
                " make it longer with model.new_cache(batch, length)"
            )
        if self.rings and self.chunk is not None and length > self.chunk:
            raise InputError(
                f"{length} tokens at once would push each other out of the cache's rings; pass {self.chunk} or fewer,"
                " or make the cache with a larger chunk"
            )

    def commit(self, new: Places, *, padded: bool) -> None:
        """Count the new tokens as read. Until then a step that failed can be taken again."""
        length = new.position.shape[-1]
        torch.maximum(self.reach, self.length + length, out=self.reach)
        self.length += (new.position >= 0).sum(-1)
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
        kept = torch.minimum(self.length, kept)
        for slots, window in self.rings:
            lost = (self.reach - slots > (kept - window).clamp(min=0)) & (kept < self.length)
            if bool(lost.any()):
                raise InputError(
                    f"row {int(lost.long().argmax())} cannot go back so far: its ring of {slots} slots no longer has"
                    f" the {window} tokens before; make the cache with a larger chunk, or none"
                )
        self.length.copy_(kept)
        self.least = min(self.least, length) if isinstance(length, int) else 0
        if isinstance(length, int):
            self.used = min(self.used, length)

    def select(self, rows: Int[Tensor, " B"]) -> None:
        """Row i becomes what row rows[i] was."""
        for layer in self.layers + (self.cross or []):
            layer.select(rows)
        self.length, self.reach = self.length[rows], self.reach[rows]
        if self.memory is not None and len(self.memory.position) > 1:
            self.memory = Places(self.memory.position[rows])
        self.batch = len(rows)
