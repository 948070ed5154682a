"""Caches that texts come into and leave: rows in one piece, in rings or in pages, in the model's numbers or in int8."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.pages import TRASH
from cutaway.model.cache import Cache, CrossCache, LayerCache, Step, Widths
from cutaway.model.masks import EMPTY, Places
from cutaway.model.transformer import Transformer

Kind = Literal["full", "ring", "paged"]
KINDS: tuple[Kind, ...] = ("full", "ring", "paged")
PAGE = 64
"""Tokens in a page."""


class Store:
    """Vectors of heads in slots, kept as they are or as int8 with a scale each."""

    def __init__(self, pages: int, size: int, width: tuple[int, int], device: torch.device, dtype: torch.dtype) -> None:
        self.values = torch.zeros(pages, size, *width, device=device, dtype=dtype)
        self.scale = None
        if dtype == torch.int8:
            self.scale = torch.zeros(pages, size, width[0], device=device, dtype=torch.float16)

    def put(self, slot: Int[Tensor, "B T"], x: Float[Tensor, "B T G D"]) -> None:
        """Slots are counted through all pages."""
        if self.scale is not None:
            scale = (x.abs().amax(-1).float() / 127).clamp(min=1e-7).half()
            self.scale.flatten(0, 1)[slot] = scale
            x = (x.float() / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        self.values.flatten(0, 1)[slot] = x.to(self.values.dtype)

    def get(self, pages: Int[Tensor, "B P"] | slice, span: int, dtype: torch.dtype) -> Float[Tensor, "B S G D"]:
        """The first slots of each row's pages."""
        values = self.values[pages]
        values = (values if isinstance(pages, slice) else values.flatten(1, 2))[:, :span]
        if self.scale is None:
            return values.to(dtype)
        scale = self.scale[pages]
        scale = (scale if isinstance(pages, slice) else scale.flatten(1, 2))[:, :span]
        return (values.float() * scale.float().unsqueeze(-1)).to(dtype)

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scale is None else [self.values, self.scale]


class PagedLayer(LayerCache):
    """One layer's keys and values in pages. A row has one page of its own, or those that the table names."""

    def __init__(
        self, rows: int, slots: int, pages: int, size: int, widths: Widths, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slots, self.size = slots, size
        self.keys, self.values = (Store(pages, size, width, device, dtype) for width in widths)
        self.pages: Int[Tensor, "B P"] | slice = slice(0, rows)
        self.names = torch.arange(rows, device=device).unsqueeze(-1)
        """Every row's pages, by number."""

    def write(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], step: Step
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        self.keys.put(step.slot, k)
        self.values.put(step.slot, v)
        pages = self.pages if isinstance(self.pages, slice) else self.pages[:, : -(-step.span // self.size)]
        return self.keys.get(pages, step.span, k.dtype), self.values.get(pages, step.span, v.dtype)

    def select(self, rows: Int[Tensor, " B"]) -> None:
        raise InputError("rows that share pages are not copied; use model.new_cache for that")


class Rows(Cache):
    """A cache of `rows` texts, each of which comes and goes on its own."""

    def __init__(
        self,
        model: Transformer,
        rows: int,
        slots: int,
        *,
        kind: Kind = "full",
        dtype: torch.dtype | None = None,
        chunk: int | None = None,
        pages: int | None = None,
        source: int = 0,
    ) -> None:
        """`pages`: how many there are for all rows together, if not enough for all. `source`: the longest source."""
        self.kind = kind
        self.first = 0
        paged = kind == "paged"
        size = min(PAGE, slots) if paged else 0
        slots = -(-slots // size) * size if paged else slots
        count = 1 + (pages if pages is not None else rows * (slots // size)) if paged else rows

        def make(batch: int, room: int, widths: Widths, device: torch.device, dtype: torch.dtype) -> PagedLayer:
            return PagedLayer(rows, room, count, size or room, widths, device, dtype)

        stack = model.stacks["decoder"]
        cross = "encoder" in model.stacks
        super().__init__(
            stack.cache_widths,
            rows,
            slots,
            windows=stack.windows,
            cross=cross,
            device=model.device,
            dtype=dtype or model.dtype,
            chunk=chunk if kind == "ring" else None,
            make_layer=make,
        )
        self.page = size
        self.page_count = count
        self.table: Int[Tensor, "B P"] | None = None
        if paged:
            self.table = torch.full((rows, slots // size), TRASH, dtype=torch.long, device=model.device)
            for layer in self.paged:
                layer.pages = layer.names = self.table
        if self.cross is not None:
            self.memory = Places(torch.full((rows, source), EMPTY, device=model.device))
            for part, (heads, width) in zip(self.cross, cross_widths(model), strict=True):
                part.k, part.v = (
                    torch.zeros(rows, source, heads, width, device=model.device, dtype=model.dtype) for _ in "kv"
                )

    @property
    def paged(self) -> list[PagedLayer]:
        """The layers, as what they are made of here."""
        return cast("list[PagedLayer]", self.layers)

    def place(self, length: int, mask: Bool[Tensor, "B T"] | None) -> tuple[Places, dict[int, Step]]:
        """As in any cache, with slots counted through all pages."""
        new, steps = super().place(length, mask)
        row = torch.arange(self.first, self.first + self.batch, device=self.length.device).unsqueeze(-1)
        for slots, step in steps.items():
            if self.table is None:
                slot = row * slots + step.slot
            else:
                slot = self.table.gather(1, step.slot // self.page) * self.page + step.slot % self.page
            steps[slots] = step._replace(slot=slot)
        return new, steps

    def part(self, start: int, stop: int, *, most: int) -> "Rows":
        """Some of the rows as a cache of their own over the same memory; none has read more than `most`."""
        some = copy.copy(self)
        some.first, some.batch, some.used = start, stop - start, most
        some.least = self.slots  # whoever hands out rows reads texts again that grow past a turn of LongRoPE
        some.length, some.reach = self.length[start:stop], self.reach[start:stop]
        some.table = None if self.table is None else self.table[start:stop]
        some.layers = []
        for layer in self.paged:
            own = copy.copy(layer)
            own.names = layer.names[start:stop]
            own.pages = slice(start, stop) if some.table is None else own.names
            some.layers.append(own)
        if self.cross is not None and self.memory is not None:
            some.memory = Places(self.memory.position[start:stop])
            some.cross = []
            for part in self.cross:
                assert part.k is not None
                assert part.v is not None
                own_part = CrossCache()
                own_part.k, own_part.v = part.k[start:stop], part.v[start:stop]
                some.cross.append(own_part)
        return some

    def open(self, row: int, length: int = 0, pages: Sequence[int] = ()) -> None:
        """Give a row to a new text, of which the first `length` tokens are in its pages already."""
        self.length[row] = length
        self.reach[row] = length
        if self.table is not None:
            names = torch.full((self.table.shape[1],), TRASH)
            names[: len(pages)] = torch.tensor(list(pages), dtype=torch.long)
            self.table[row] = names.to(self.table.device)

    def close(self, row: int) -> None:
        """The text is done: what is still written to its row must harm no page that others get."""
        self.open(row)

    def swap(self, a: int, b: int) -> None:
        """Two texts change rows."""
        if a == b:
            return
        moved = [self.length, self.reach, *self.sources()]
        moved += self.stored() if self.table is None else [self.table]
        if self.memory is not None:
            moved.append(self.memory.position)
        for tensor in moved:  # by single rows: a list of indices would have to be sent to the device each time
            kept = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = kept

    def wipe(self, row: int, pages: Sequence[int] = ()) -> None:
        """Zero a row, or its pages: a NaN there would be felt by the next text, though it sees it with weight 0."""
        for tensor in self.stored():
            for place in [row] if self.table is None else [TRASH, *pages]:
                tensor[place] = 0
        for tensor in self.sources():
            tensor[row] = 0

    def remember_source(self, row: int, read: Cache) -> None:
        """Take what a text's own cache of one row holds of its source."""
        assert self.memory is not None
        assert read.memory is not None
        length = read.memory.position.shape[-1]
        self.memory.position[row] = EMPTY
        self.memory.position[row, :length] = read.memory.position[0]
        for mine, theirs in zip(self.cross or [], read.cross or [], strict=True):
            mine.k[row, :length], mine.v[row, :length] = theirs.k[0], theirs.v[0]  # type: ignore[index]

    def stored(self) -> list[Tensor]:
        """All keys and values, first by row or page."""
        stores: list[Store] = [x for layer in self.paged for x in (layer.keys, layer.values)]
        return [tensor for store in stores for tensor in store.tensors()]

    def sources(self) -> list[Tensor]:
        """What is kept of the sources, first by row."""
        return [x for part in self.cross or [] for x in (part.k, part.v) if x is not None]

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(x.numel() * x.element_size() for x in [*self.stored(), *self.sources()])


def cross_widths(model: Transformer) -> list[tuple[int, int]]:
    """(heads, width) of what each layer keeps of a source."""
    blocks: Any = model.stacks["decoder"].blocks
    return [(block.cross.f.kv_heads, block.cross.f.d_head) for block in blocks]
