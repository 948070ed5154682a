"""KV cache of the engine: one row per running request, in a full, ring-buffer or paged layout, optionally in int8.

All three layouts consist of pages, and a page consists of slots, each with the keys and values of one token. `full` and
`ring` have one page per row, as long as the row, so that the page of a row is the row itself. `paged` has pages of
PAGE_SIZE slots and a page table (row, page index) → page id.
A flat slot is page_id · page_size + offset: an index into the buffers with their first two dimensions flattened.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.device import GIB
from cutaway.errors import InputError
from cutaway.generate.engine.page_allocator import NULL_PAGE
from cutaway.generate.sampling.sampler import swap_tensor_rows
from cutaway.model.cache import Cache, CacheShape, CrossCache, LayerCache, SlotMapping
from cutaway.model.masks import EMPTY_POSITION, TokenPositions
from cutaway.model.transformer import Transformer

CacheImplementation = Literal["full", "ring", "paged"]
CACHE_IMPLEMENTATIONS: tuple[CacheImplementation, ...] = ("full", "ring", "paged")
PAGE_SIZE = 64
"""Number of tokens per page."""


class KVBuffer:
    """Keys or values of one layer: (num_pages, page_size, heads, width), in the cache dtype or in int8.

    int8 values have one float16 scale per head and slot: x ≈ values · scale with scale = max|x| / 127.
    """

    def __init__(
        self, num_pages: int, page_size: int, head_shape: tuple[int, int], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.values = _zeros((num_pages, page_size, *head_shape), device, dtype)
        self.scale = None
        if dtype == torch.int8:
            self.scale = _zeros((num_pages, page_size, head_shape[0]), device, torch.float16)

    def write(self, slots: Int[Tensor, "B T"], x: Float[Tensor, "B T G D"]) -> None:
        """Write the keys or values x to flat slots. In an int8 buffer, x is quantized first."""
        if self.scale is not None:
            # Divide by the rounded float16 scale, the one that `gather` multiplies by.
            scale = (x.abs().amax(-1).float() / 127).clamp(min=1e-7).half()
            self.scale.flatten(0, 1)[slots] = scale
            x = (x.float() / scale.float().unsqueeze(-1)).round().clamp(-127, 127)
        self.values.flatten(0, 1)[slots] = x.to(self.values.dtype)

    def gather(
        self, page_index: Int[Tensor, "B P"] | slice, num_slots: int, dtype: torch.dtype
    ) -> Float[Tensor, "B S G D"]:
        """Return the keys or values in the first `num_slots` slots of each row, converted to `dtype`.

        `page_index`: page ids per row, or the range of rows in the layouts with one page per row (a view, no copy).
        """
        values = self.values[page_index]  # (B, P, page_size, G, D); with a slice (B, page_size, G, D)
        values = (values if isinstance(page_index, slice) else values.flatten(1, 2))[:, :num_slots]
        if self.scale is None:
            return values.to(dtype)
        scale = self.scale[page_index]  # the shape of `values` without D
        scale = (scale if isinstance(page_index, slice) else scale.flatten(1, 2))[:, :num_slots]
        return (values.float() * scale.float().unsqueeze(-1)).to(dtype)

    def tensors(self) -> list[Tensor]:
        return [self.values] if self.scale is None else [self.values, self.scale]


class PagedLayerCache(LayerCache):
    """Keys and values of one layer in pages. A row has one page, or the pages that the page table lists for it."""

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        cache_shape: CacheShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        num_pages: int,
        page_size: int | None,
    ) -> None:
        """`page_size` None: one page per row, as long as the row."""
        self.num_slots, self.page_size = num_slots, page_size or num_slots
        self.keys, self.values = (KVBuffer(num_pages, self.page_size, width, device, dtype) for width in cache_shape)
        # Index that `gather` uses: a slice of rows, which gives a view, or the page table.
        self.page_index: Int[Tensor, "B P"] | slice = slice(0, batch_size)
        self.page_table = torch.arange(batch_size).to(device).unsqueeze(-1)  # arange on meta imports SymPy
        """Page ids of each row. If a row has one page, the page id is the row number."""
        self.query_tiles: Int[Tensor, "n 4"] | None = None
        """Tiles of the queries in a batch of chunks: see `PackedCacheView`."""
        self.has_padding = False
        """Whether such a batch has rows that are in no tile."""

    def update(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], slot_mapping: SlotMapping
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        self.keys.write(slot_mapping.slots, k)
        self.values.write(slot_mapping.slots, v)
        # Read only the pages that hold the first num_keys slots.
        pages, num_keys = self.page_index, slot_mapping.num_keys
        if not isinstance(pages, slice):
            pages = pages[:, : -(-num_keys // self.page_size)]
        return self.keys.gather(pages, num_keys, k.dtype), self.values.gather(pages, num_keys, v.dtype)

    def select_rows(self, rows: Int[Tensor, " B"]) -> None:
        raise InputError("rows of a paged cache cannot be reordered; use model.new_cache for beam search")


class BatchKVCache(Cache):
    """KV cache of `batch_size` rows. A row is assigned to at most one request at a time."""

    def __init__(
        self,
        model: Transformer,
        batch_size: int,
        num_slots: int,
        *,
        device: torch.device | None = None,
        implementation: CacheImplementation = "full",
        dtype: torch.dtype | None = None,
        chunk_size: int | None = None,
        num_pages: int | None = None,
        max_source_len: int = 0,
    ) -> None:
        """`num_pages`: number of pages of a paged cache without the null page. The default is enough for all rows."""
        device = model.device if device is None else device
        self.implementation = implementation
        self.first_row = 0
        paged = implementation == "paged"
        page_size = min(PAGE_SIZE, num_slots) if paged else 0
        num_slots = -(-num_slots // page_size) * page_size if paged else num_slots  # whole pages
        total_pages = batch_size
        if paged:
            total_pages = 1 + (batch_size * (num_slots // page_size) if num_pages is None else num_pages)
        stack = model.stacks["decoder"]
        super().__init__(
            stack.cache_shapes,
            batch_size,
            num_slots,
            windows=stack.windows,
            has_cross_attention="encoder" in model.stacks,
            device=device,
            dtype=dtype or model.dtype,
            chunk_size=chunk_size if implementation == "ring" else None,
            build_layer=partial(PagedLayerCache, num_pages=total_pages, page_size=page_size if paged else None),
        )
        self.page_size = page_size
        self.num_pages = total_pages
        self.page_table: Int[Tensor, "B P"] | None = None
        if paged:
            shape = batch_size, num_slots // page_size
            self.page_table = torch.full(shape, NULL_PAGE, dtype=torch.long, device=device)
            for layer in self.paged_layers:
                layer.page_index = layer.page_table = self.page_table
        if self.cross_layers is not None:
            empty = torch.full((batch_size, max_source_len), EMPTY_POSITION, device=device)
            self.memory_positions = TokenPositions(empty)
            for cross_layer, block in zip(self.cross_layers, stack.blocks, strict=True):
                cross_attention: Any = block.cross.f  # type: ignore[union-attr]
                shape4 = batch_size, max_source_len, *cross_attention.cache_shape[0]  # of this rank's heads
                cross_layer.k = torch.zeros(shape4, device=device, dtype=model.dtype)
                cross_layer.v = torch.zeros_like(cross_layer.k)

    @property
    def paged_layers(self) -> list[PagedLayerCache]:
        """`layers`, typed as a list of PagedLayerCache."""
        return cast("list[PagedLayerCache]", self.layers)

    def assign_slots(
        self, num_tokens: int, mask: Bool[Tensor, "B T"] | None
    ) -> tuple[TokenPositions, dict[int, SlotMapping]]:
        """Call `Cache.assign_slots` and convert the slots of each row to flat slots."""
        new, slot_mappings = super().assign_slots(num_tokens, mask)
        row = torch.arange(self.first_row, self.first_row + self.batch_size, device=self.seq_lens.device).unsqueeze(-1)
        for num_slots, mapping in slot_mappings.items():
            if self.page_table is None:
                flat_slots = row * num_slots + mapping.slots
            else:
                pages = self.page_table.gather(1, mapping.slots // self.page_size)
                flat_slots = pages * self.page_size + mapping.slots % self.page_size
            slot_mappings[num_slots] = mapping._replace(slots=flat_slots)
        return new, slot_mappings

    def view_rows(self, start: int, stop: int, *, max_len: int) -> "BatchKVCache":
        """Return a cache of rows start … stop − 1 that shares this cache's memory.

        `max_len`: upper bound of the rows' lengths, known on the host, which limits how many keys attention reads.
        """
        view = copy.copy(self)
        view.first_row, view.batch_size, view.max_len = start, stop - start, max_len
        # min_len selects the LongRoPE frequencies. No forward pass crosses a switch length, because the engine prefills
        # again there.
        view.min_len = self.num_slots
        view.seq_lens, view.write_end = self.seq_lens[start:stop], self.write_end[start:stop]
        view.page_table = None if self.page_table is None else self.page_table[start:stop]
        view.layers = []
        for layer in self.paged_layers:
            layer_view = copy.copy(layer)
            layer_view.page_table = layer.page_table[start:stop]
            layer_view.page_index = slice(start, stop) if view.page_table is None else layer_view.page_table
            view.layers.append(layer_view)
        if self.cross_layers is not None and self.memory_positions is not None:
            view.memory_positions = TokenPositions(self.memory_positions.position[start:stop])
            view.cross_layers = []
            for cross_layer in self.cross_layers:
                assert cross_layer.k is not None
                assert cross_layer.v is not None
                cross_view = CrossCache()
                cross_view.k, cross_view.v = cross_layer.k[start:stop], cross_layer.v[start:stop]
                view.cross_layers.append(cross_view)
        return view

    def view_chunks(
        self,
        positions: Int[Tensor, " N"],
        rows: Int[Tensor, " N"],
        query_tiles: Int[Tensor, "n 4"],
        *,
        max_len: int,
        has_padding: bool = False,
    ) -> "PackedCacheView":
        """Return a cache view for a batch of N tokens, which are chunks of the sequences in several rows.

        `positions`, `rows`: of each token. `query_tiles`: see `fast.packed_prefill.query_tiles`. With `has_padding`,
        tokens at EMPTY_POSITION are padding; their keys and values are written to the null page (paged cache only)."""
        view = PackedCacheView.__new__(PackedCacheView)
        vars(view).update(vars(self))
        view.batch_size, view.max_len, view.min_len = len(positions), max_len, self.num_slots
        view.positions, view.rows, view.has_padding = positions, rows, has_padding
        view.layers = []
        for layer in self.paged_layers:
            layer_view = copy.copy(layer)
            layer_view.query_tiles, layer_view.has_padding = query_tiles, has_padding
            view.layers.append(layer_view)
        return view

    def assign_row(self, row: int, length: int = 0, page_ids: Sequence[int] = ()) -> None:
        """Assign a row to a new sequence, of which the first `length` tokens are already in its pages."""
        self.seq_lens[row] = length
        self.write_end[row] = length
        if self.page_table is not None:
            page_row = torch.full((self.page_table.shape[1],), NULL_PAGE)
            page_row[: len(page_ids)] = torch.tensor(list(page_ids), dtype=torch.long)
            self.page_table[row] = page_row.to(self.page_table.device)

    def append_page(self, row: int, index: int, page_id: int) -> None:
        """Add a page to the sequence in `row`, as its page number `index`."""
        assert self.page_table is not None
        self.page_table[row, index] = page_id

    def copy_page(self, source: int, target: int) -> None:
        """Copy the keys and values of a page in all layers."""
        for tensor in self.kv_tensors():
            tensor[target] = tensor[source]

    def clear_row(self, row: int) -> None:
        """Reset a released row to the null page.

        A step that was already launched may still write to the row, and must not write to pages of other requests."""
        self.assign_row(row)

    def swap_rows(self, a: int, b: int) -> None:
        """Exchange two rows. In a paged cache, page ids are exchanged and keys and values are not moved."""
        if a == b:
            return
        tensors = [self.seq_lens, self.write_end, *self.cross_tensors()]
        tensors += self.kv_tensors() if self.page_table is None else [self.page_table]
        if self.memory_positions is not None:
            tensors.append(self.memory_positions.position)
        for tensor in tensors:
            swap_tensor_rows(tensor, a, b)

    def zero_row(self, row: int, page_ids: Sequence[int] = ()) -> None:
        """Zero the keys and values of a row; in a paged cache, those of the pages `page_ids` and of the null page.

        Masked slots have attention weight 0, but 0 · NaN is NaN and would affect later sequences."""
        for tensor in self.kv_tensors():
            for index in [row] if self.page_table is None else [NULL_PAGE, *page_ids]:
                tensor[index] = 0
        for tensor in self.cross_tensors():
            tensor[row] = 0

    def store_cross_cache(self, row: int, source_cache: Cache) -> None:
        """Copy the cross-attention keys and values of a single-row cache to `row`."""
        assert self.memory_positions is not None
        assert source_cache.memory_positions is not None
        length = source_cache.memory_positions.position.shape[-1]
        self.memory_positions.position[row] = EMPTY_POSITION
        self.memory_positions.position[row, :length] = source_cache.memory_positions.position[0]
        for target, source in zip(self.cross_layers or [], source_cache.cross_layers or [], strict=True):
            target.k[row, :length], target.v[row, :length] = source.k[0], source.v[0]  # type: ignore[index]

    def kv_tensors(self) -> list[Tensor]:
        """Self-attention keys and values of all layers, and their int8 scales. Dimension 0 is the page, or the row."""
        return [x for layer in self.paged_layers for buffer in (layer.keys, layer.values) for x in buffer.tensors()]

    def cross_tensors(self) -> list[Tensor]:
        """Cross-attention keys and values of all layers. Dimension 0 is the row."""
        return [x for layer in self.cross_layers or [] for x in (layer.k, layer.v) if x is not None]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all keys, values and int8 scales, including the keys and values of cross-attention."""
        return sum(x.nbytes for x in [*self.kv_tensors(), *self.cross_tensors()])


class PackedCacheView(BatchKVCache):
    """View of a cache for a forward pass over tokens of several sequences without padding, each a batch row of its own.

    Only the attention of the GPU decode model supports it. The caller updates `seq_lens` of the cache."""

    positions: Int[Tensor, " N"]
    rows: Int[Tensor, " N"]
    has_padding: bool

    def assign_slots(
        self, num_tokens: int, mask: Bool[Tensor, "B T"] | None
    ) -> tuple[TokenPositions, dict[int, SlotMapping]]:
        assert num_tokens == 1
        assert mask is None
        new = TokenPositions(self.positions.unsqueeze(-1), limit=self.max_len)
        slot_mappings = {}
        for num_slots in {layer.num_slots for layer in self.layers}:
            slots = self.positions % num_slots
            if self.page_table is None:
                flat_slots = self.rows * num_slots + slots
            else:
                flat_slots = self.page_table[self.rows, slots // self.page_size] * self.page_size
                flat_slots += slots % self.page_size
            if self.has_padding:
                flat_slots = torch.where(self.positions < 0, NULL_PAGE * self.page_size, flat_slots)
            slot_mappings[num_slots] = SlotMapping(flat_slots.unsqueeze(-1), new, 0)
        return new, slot_mappings

    def commit(self, new_positions: TokenPositions, *, has_padding: bool) -> None:
        return


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Tensor of zeros. On the CPU, the operating system provides its memory when it is first written to.

    torch.zeros writes all of it. NumPy allocates with calloc, so that the unused part of a buffer takes no memory and
    a paged cache can grow without being moved."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    num_bytes = dtype.itemsize * math.prod(shape)
    try:
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
    except MemoryError:
        raise InputError(
            f"the operating system refused {num_bytes / GIB:.3g} GiB for the KV cache; lower kv_cache_memory_bytes,"
            " max_num_seqs or max_model_len"
        ) from None
