"""Caches that texts come into and leave: rows in one piece, in rings or in pages, in the model's numbers or in int8."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.engine.paging import NULL_PAGE
from cutaway.model.cache import Cache, CacheShape, CrossCache, LayerCache, SlotMapping
from cutaway.model.masks import EMPTY_POSITION, TokenPositions
from cutaway.model.transformer import Transformer

CacheImplementation = Literal["full", "ring", "paged"]
CACHE_IMPLEMENTATIONS: tuple[CacheImplementation, ...] = ("full", "ring", "paged")
PAGE_SIZE = 64
"""Tokens in a page."""


class KVBuffer:
    """Vectors of heads in slots, kept as they are or as int8 with a scale each."""

    def __init__(
        self, num_pages: int, page_size: int, head_shape: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.values = torch.zeros(num_pages, page_size, *head_shape, device=device, dtype=dtype)
        self.scale = None
        if dtype == torch.int8:
            self.scale = torch.zeros(num_pages, page_size, head_shape[0], device=device, dtype=torch.float16)

    def write(self, slots: Int[Tensor, "B T"], x: Float[Tensor, "B T G D"]) -> None:
        """Slots are counted through all pages."""
        if self.scale is not None:
            scale = (x.abs().amax(-1).float() / 127).clamp(min=1e-7).half()
            self.scale.flatten(0, 1)[slots] = scale
            x = (x.float() / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        self.values.flatten(0, 1)[slots] = x.to(self.values.dtype)

    def gather(
        self, page_index: Int[Tensor, "B P"] | slice, num_slots: int, dtype: torch.dtype
    ) -> Float[Tensor, "B S G D"]:
        """The first slots of each row's pages."""
        values = self.values[page_index]
        values = (values if isinstance(page_index, slice) else values.flatten(1, 2))[:, :num_slots]
        if self.scale is None:
            return values.to(dtype)
        scale = self.scale[page_index]
        scale = (scale if isinstance(page_index, slice) else scale.flatten(1, 2))[:, :num_slots]
        return (values.float() * scale.float().unsqueeze(-1)).to(dtype)

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scale is None else [self.values, self.scale]


class PagedLayerCache(LayerCache):
    """One layer's keys and values in pages. A row has one page of its own, or those that the table names."""

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        num_pages: int,
        page_size: int,
        cache_shape: CacheShape,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots, self.page_size = num_slots, page_size
        self.keys, self.values = (KVBuffer(num_pages, page_size, width, device, dtype) for width in cache_shape)
        self.page_index: Int[Tensor, "B P"] | slice = slice(0, batch_size)
        self.page_table = torch.arange(batch_size, device=device).unsqueeze(-1)
        """Every row's pages, by number."""

    def update(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], slot_mapping: SlotMapping
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        self.keys.write(slot_mapping.slots, k)
        self.values.write(slot_mapping.slots, v)
        pages = (
            self.page_index
            if isinstance(self.page_index, slice)
            else self.page_index[:, : -(-slot_mapping.num_keys // self.page_size)]
        )
        return self.keys.gather(pages, slot_mapping.num_keys, k.dtype), self.values.gather(
            pages, slot_mapping.num_keys, v.dtype
        )

    def select_rows(self, rows: Int[Tensor, " B"]) -> None:
        raise InputError("rows that share pages are not copied; use model.new_cache for that")


class BatchKVCache(Cache):
    """A cache of `batch_size` texts, each of which comes and goes on its own."""

    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        num_slots: int,
        *,
        implementation: CacheImplementation = "full",
        dtype: torch.dtype | None = None,
        chunk_size: int | None = None,
        num_pages: int | None = None,
        max_source_len: int = 0,
    ) -> None:
        """`num_pages`: how many there are for all rows together, if not enough for all."""
        self.implementation = implementation
        self.first_row = 0
        paged = implementation == "paged"
        size = min(PAGE_SIZE, num_slots) if paged else 0
        num_slots = -(-num_slots // size) * size if paged else num_slots
        count = 1 + (num_pages if num_pages is not None else batch_size * (num_slots // size)) if paged else batch_size

        def make(
            batch: int, room: int, widths: CacheShape, device: torch.device, dtype: torch.dtype
        ) -> PagedLayerCache:
            return PagedLayerCache(batch_size, room, count, size or room, widths, device, dtype)

        stack = model.stacks["decoder"]
        cross = "encoder" in model.stacks
        super().__init__(
            stack.cache_shapes,
            batch_size,
            num_slots,
            windows=stack.windows,
            has_cross_attention=cross,
            device=model.device,
            dtype=dtype or model.dtype,
            chunk_size=chunk_size if implementation == "ring" else None,
            build_layer=make,
        )
        self.page_size = size
        self.num_pages = count
        self.page_table: Int[Tensor, "B P"] | None = None
        if paged:
            self.page_table = torch.full(
                (batch_size, num_slots // size), NULL_PAGE, dtype=torch.long, device=model.device
            )
            for layer in self.paged_layers:
                layer.page_index = layer.page_table = self.page_table
        if self.cross_layers is not None:
            self.memory_positions = TokenPositions(
                torch.full((batch_size, max_source_len), EMPTY_POSITION, device=model.device)
            )
            for part, (heads, width) in zip(self.cross_layers, cross_cache_shapes(model), strict=True):
                part.k, part.v = (
                    torch.zeros(batch_size, max_source_len, heads, width, device=model.device, dtype=model.dtype)
                    for _ in "kv"
                )

    @property
    def paged_layers(self) -> list[PagedLayerCache]:
        """The layers, as what they are made of here."""
        return cast("list[PagedLayerCache]", self.layers)

    def assign_slots(
        self, num_tokens: int, mask: Bool[Tensor, "B T"] | None
    ) -> tuple[TokenPositions, dict[int, SlotMapping]]:
        """As in any cache, with slots counted through all pages."""
        new, steps = super().assign_slots(num_tokens, mask)
        row = torch.arange(self.first_row, self.first_row + self.batch_size, device=self.seq_lens.device).unsqueeze(-1)
        for slots, step in steps.items():
            if self.page_table is None:
                slot = row * slots + step.slots
            else:
                slot = (
                    self.page_table.gather(1, step.slots // self.page_size) * self.page_size
                    + step.slots % self.page_size
                )
            steps[slots] = step._replace(slots=slot)
        return new, steps

    def view_rows(self, start: int, stop: int, *, max_len: int) -> "BatchKVCache":
        """Some of the rows as a cache of their own over the same memory; none has read more than `max_len`."""
        some = copy.copy(self)
        some.first_row, some.batch_size, some.max_len = start, stop - start, max_len
        some.min_len = self.num_slots  # whoever hands out rows reads texts again that grow past a turn of LongRoPE
        some.seq_lens, some.write_end = self.seq_lens[start:stop], self.write_end[start:stop]
        some.page_table = None if self.page_table is None else self.page_table[start:stop]
        some.layers = []
        for layer in self.paged_layers:
            own = copy.copy(layer)
            own.page_table = layer.page_table[start:stop]
            own.page_index = slice(start, stop) if some.page_table is None else own.page_table
            some.layers.append(own)
        if self.cross_layers is not None and self.memory_positions is not None:
            some.memory_positions = TokenPositions(self.memory_positions.position[start:stop])
            some.cross_layers = []
            for part in self.cross_layers:
                assert part.k is not None
                assert part.v is not None
                own_part = CrossCache()
                own_part.k, own_part.v = part.k[start:stop], part.v[start:stop]
                some.cross_layers.append(own_part)
        return some

    def assign_row(self, row: int, length: int = 0, page_ids: Sequence[int] = ()) -> None:
        """Give a row to a new text, of which the first `length` tokens are in its pages already."""
        self.seq_lens[row] = length
        self.write_end[row] = length
        if self.page_table is not None:
            names = torch.full((self.page_table.shape[1],), NULL_PAGE)
            names[: len(page_ids)] = torch.tensor(list(page_ids), dtype=torch.long)
            self.page_table[row] = names.to(self.page_table.device)

    def clear_row(self, row: int) -> None:
        """The text is done: what is still written to its row must harm no page that others get."""
        self.assign_row(row)

    def swap_rows(self, a: int, b: int) -> None:
        """Two texts change rows."""
        if a == b:
            return
        moved = [self.seq_lens, self.write_end, *self.cross_tensors()]
        moved += self.kv_tensors() if self.page_table is None else [self.page_table]
        if self.memory_positions is not None:
            moved.append(self.memory_positions.position)
        for tensor in moved:  # by single rows: a list of indices would have to be sent to the device each time
            kept = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = kept

    def zero_row(self, row: int, page_ids: Sequence[int] = ()) -> None:
        """Zero a row, or its pages: a NaN there would be felt by the next text, though it sees it with weight 0."""
        for tensor in self.kv_tensors():
            for place in [row] if self.page_table is None else [NULL_PAGE, *page_ids]:
                tensor[place] = 0
        for tensor in self.cross_tensors():
            tensor[row] = 0

    def store_cross_cache(self, row: int, source_cache: Cache) -> None:
        """Take what a text's own cache of one row holds of its source."""
        assert self.memory_positions is not None
        assert source_cache.memory_positions is not None
        length = source_cache.memory_positions.position.shape[-1]
        self.memory_positions.position[row] = EMPTY_POSITION
        self.memory_positions.position[row, :length] = source_cache.memory_positions.position[0]
        for mine, theirs in zip(self.cross_layers or [], source_cache.cross_layers or [], strict=True):
            mine.k[row, :length], mine.v[row, :length] = theirs.k[0], theirs.v[0]  # type: ignore[index]

    def kv_tensors(self) -> list[Tensor]:
        """All keys and values, first by row or page."""
        stores: list[KVBuffer] = [x for layer in self.paged_layers for x in (layer.keys, layer.values)]
        return [tensor for store in stores for tensor in store.tensors()]

    def cross_tensors(self) -> list[Tensor]:
        """What is kept of the sources, first by row."""
        return [x for part in self.cross_layers or [] for x in (part.k, part.v) if x is not None]

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return sum(x.numel() * x.element_size() for x in [*self.kv_tensors(), *self.cross_tensors()])


def cross_cache_shapes(model: Transformer) -> list[tuple[int, int]]:
    """(heads, width) of what each layer keeps of a source."""
    blocks: Any = model.stacks["decoder"].blocks
    return [(block.cross.f.kv_heads, block.cross.f.d_head) for block in blocks]
