"""KV cache. Slot positions are computed from the row's sequence length, and attention masks from the positions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cutaway.argument_checks import INTEGER_DTYPES
from cutaway.errors import InputError
from cutaway.model.masks import EMPTY_POSITION, TokenPositions

CacheShape = tuple[tuple[int, int], tuple[int, int]]
"""(heads, width) of a layer's cached keys and of its cached values."""


class SlotMapping(NamedTuple):
    """Cache slots of the new tokens, and positions of the cached keys, of layers that have equally many slots."""

    slots: Int[Tensor, "B T"]
    key_positions: TokenPositions
    """Positions of the tokens in the first `num_keys` slots, which are the slots that attention reads."""
    num_keys: int


class LayerCache:
    """Keys and values of one layer in fixed buffers of shape (batch, slot, head, width)."""

    def __init__(
        self, batch_size: int, num_slots: int, cache_shape: CacheShape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_slots = num_slots
        self.k, self.v = (
            torch.zeros(batch_size, num_slots, *width, device=device, dtype=dtype) for width in cache_shape
        )

    def update(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G E"], slot_mapping: SlotMapping
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G E"]]:
        """Write new keys and values to their slots; return the keys and values of the first `num_keys` slots."""
        row = torch.arange(len(k), device=k.device).unsqueeze(-1)
        self.k[row, slot_mapping.slots] = k.to(self.k.dtype)
        self.v[row, slot_mapping.slots] = v.to(self.v.dtype)
        return self.k[:, : slot_mapping.num_keys].to(k.dtype), self.v[:, : slot_mapping.num_keys].to(v.dtype)

    def select_rows(self, rows: Int[Tensor, " B"]) -> None:
        """Replace batch row i of the keys and values by row rows[i]."""
        self.k, self.v = self.k[rows], self.v[rows]


class CrossCache:
    """Cross-attention keys and values of one layer, computed once from the encoder output."""

    k: Tensor | None = None
    v: Tensor | None = None

    def select_rows(self, rows: Int[Tensor, " B"]) -> None:
        """Replace batch row i of the keys and values by row rows[i]."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


LayerCacheBuilder = Callable[[int, int, CacheShape, torch.device, torch.dtype], LayerCache]


class Cache:
    """KV cache of all layers. `seq_lens` holds the number of tokens in each batch row.

    The token at position p is in slot p, or in slot p modulo the number of slots in a ring buffer. The position of the
    token in a slot is therefore computed from the row's sequence length, and the mask from the positions. Padding is
    written to the slots after the row's last token and overwritten by the next tokens, so that rows of different
    lengths, padding on either side, chunked prefill and `crop` need no special case.
    """

    def __init__(
        self,
        cache_shapes: Sequence[CacheShape],
        batch_size: int,
        num_slots: int,
        *,
        windows: Sequence[int | None],
        has_cross_attention: bool,
        device: torch.device,
        dtype: torch.dtype,
        chunk_size: int | None = None,
        build_layer: LayerCacheBuilder = LayerCache,
    ) -> None:
        """Allocate the cache. With `chunk_size`, layers with a sliding window get ring buffers."""
        self.batch_size, self.num_slots, self.chunk_size = batch_size, num_slots, chunk_size
        self.cache_shapes = list(cache_shapes)
        self.layers = []
        ring_buffers = set()
        for cache_shape, window in zip(cache_shapes, windows, strict=True):
            n = num_slots if window is None or chunk_size is None else min(num_slots, window + chunk_size - 1)
            self.layers.append(build_layer(batch_size, n, cache_shape, device, dtype))
            if window is not None and n < num_slots:
                ring_buffers.add((n, window))
        self.ring_buffers = sorted(ring_buffers)
        """(num_slots, window) of the layers with a ring buffer."""
        self.cross_layers = [CrossCache() for _ in cache_shapes] if has_cross_attention else None
        self.memory_positions: TokenPositions | None = None
        self.seq_lens = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.write_end = self.seq_lens.clone()  # zeros_like on meta imports SymPy, which takes 0.5 s
        """One more than the last position ever written in each row, including padding and tokens removed by `crop`."""
        self.max_len = 0
        """Upper bound of seq_lens, known without reading values from the device."""
        self.min_len = 0
        """Lower bound of seq_lens, known without reading values from the device."""
        self.static_shapes = False
        """Whether attention reads all slots in every step, so that shapes are static (CUDA graphs, torch.compile)."""

    def assign_slots(
        self, num_tokens: int, mask: Bool[Tensor, "B T"] | None
    ) -> tuple[TokenPositions, dict[int, SlotMapping]]:
        """Return the positions of `num_tokens` new tokens per row, and a dict from number of slots to slot mapping."""
        if not torch.compiler.is_compiling():
            self.check_capacity(num_tokens)
        index = torch.arange(num_tokens, device=self.seq_lens.device).expand(self.batch_size, num_tokens)
        end = self.seq_lens + num_tokens
        if mask is not None:
            count = mask.sum(-1)
            if num_tokens > 1:  # tokens first, padding after them
                index = torch.where(mask, mask.cumsum(-1) - 1, count.unsqueeze(-1) + (~mask).cumsum(-1) - 1)
            end = self.seq_lens + count
        position = self.seq_lens.unsqueeze(-1) + index
        new = TokenPositions(
            position if mask is None else torch.where(mask, position, EMPTY_POSITION),
            is_sequential=mask is None and self.max_len == 0,
            limit=self.num_slots if self.static_shapes else self.max_len + num_tokens,
        )
        slot_mappings = {}
        for num_slots in {layer.num_slots for layer in self.layers}:
            num_keys = num_slots if self.static_shapes else min(num_slots, self.max_len + num_tokens)
            last = end.unsqueeze(-1) - 1
            # The latest position p ≤ last with p ≡ slot (mod num_slots); negative for slots not written yet.
            slot_position = last - (last - torch.arange(num_keys, device=end.device)) % num_slots
            key_positions = TokenPositions(
                slot_position.clamp(min=EMPTY_POSITION), is_sequential=new.is_sequential and num_keys == num_tokens
            )
            slot_mappings[num_slots] = SlotMapping(position % num_slots, key_positions, num_keys)
        return new, slot_mappings

    def check_capacity(self, num_tokens: int) -> None:
        """Raise if `num_tokens` more tokens per row do not fit, or exceed the `chunk_size` of ring buffers."""
        if self.max_len + num_tokens > self.num_slots:
            self.max_len = int(self.seq_lens.max())  # max_len is an upper bound; read the true lengths
        if self.max_len + num_tokens > self.num_slots:
            raise InputError(
                f"the cache has {self.num_slots} slots, {self.max_len} of them used: {num_tokens} more tokens do not"
                " fit; allocate a longer cache with model.new_cache(batch_size, max_seq_len)"
            )
        if self.ring_buffers and self.chunk_size is not None and num_tokens > self.chunk_size:
            raise InputError(
                f"{num_tokens} tokens exceed the chunk_size {self.chunk_size} of the cache's ring buffers; pass"
                f" {self.chunk_size} or fewer at once, or allocate the cache with a larger chunk_size"
            )

    def commit(self, new_positions: TokenPositions, *, has_padding: bool) -> None:
        """Add the numbers of new tokens to `seq_lens`. A forward pass that failed before this call can be repeated."""
        num_tokens = new_positions.position.shape[-1]
        torch.maximum(self.write_end, self.seq_lens + num_tokens, out=self.write_end)
        self.seq_lens += (new_positions.position >= 0).sum(-1)
        self.max_len += num_tokens
        if not has_padding:
            self.min_len += num_tokens
        elif num_tokens > 1 and not torch.compiler.is_compiling():
            self.min_len = int(self.seq_lens.min())

    def crop(self, max_length: int | Int[Tensor, " B"]) -> None:
        """Keep the first `max_length` tokens of each row and remove the others. A tensor gives one length per row."""
        is_int = isinstance(max_length, int) and not isinstance(max_length, bool)
        if not is_int and not (isinstance(max_length, Tensor) and max_length.dtype in INTEGER_DTYPES):
            raise InputError(
                f"max_length is {max_length!r}; pass the number of tokens to keep, or a tensor with one number per row"
            )
        kept = torch.as_tensor(max_length, device=self.seq_lens.device)
        if bool((kept < 0).any()):
            raise InputError(f"max_length is {int(kept.min())}; pass the number of tokens to keep, 0 or more")
        if kept.shape not in ((), self.seq_lens.shape):
            raise InputError(f"max_length has shape {tuple(kept.shape)}; pass one number, or {self.batch_size} numbers")
        kept = torch.minimum(self.seq_lens, kept)
        for num_slots, window in self.ring_buffers:
            overwritten = (self.write_end - num_slots > (kept - window).clamp(min=0)) & (kept < self.seq_lens)
            if bool(overwritten.any()):
                raise InputError(
                    f"row {int(overwritten.long().argmax())} cannot be cropped to this length: its ring buffer of"
                    f" {num_slots} slots no longer holds the {window} tokens before the new end; allocate a cache with"
                    " a larger chunk_size, or without chunk_size"
                )
        self.seq_lens.copy_(kept)
        self.min_len = min(self.min_len, max_length) if isinstance(max_length, int) else 0
        if isinstance(max_length, int):
            self.max_len = min(self.max_len, max_length)

    def select_rows(self, rows: Int[Tensor, " B"]) -> None:
        """Replace batch row i of the cache by row rows[i], e.g. to reorder beams. The batch size becomes len(rows)."""
        for layer in self.layers + (self.cross_layers or []):
            layer.select_rows(rows)
        self.seq_lens, self.write_end = self.seq_lens[rows], self.write_end[rows]
        if self.memory_positions is not None and len(self.memory_positions.position) > 1:
            self.memory_positions = TokenPositions(self.memory_positions.position[rows])
        self.batch_size = len(rows)
