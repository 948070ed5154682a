"""Weights that were published packed: 4 bits and a power of two a block (gpt-oss), fp8 and a scale a tile."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutaway.errors import ConfigError, WeightError
from cutaway.families.store import Entry, Store

# The eight sizes of a 4-bit float (one sign, two exponent, one mantissa bit), positive and negative.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCKS, SCALES, TILE_SCALES = "_blocks", "_scales", "_scale_inv"


def unpacked(store: Store, settings: Any) -> Store:
    """The same tensors in bf16, for the packings that families are published in; others are refused by name."""
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if method == "mxfp4":
        return Blocks(store)
    if method == "fp8" and isinstance(settings, Mapping):
        return Tiles(store, _tile(settings.get("weight_block_size", (128, 128))))
    raise ConfigError(
        f"config.json's 'quantization_config' says the weights are packed by {method!r}, and mxfp4 and fp8 are"
        " unpacked; load the model as it was before packing"
    )


class Blocks:
    """`x_blocks` (…, rows, groups, 16 bytes) and `x_scales` (…, rows, groups) are one tensor x (…, columns, rows)."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.entries: dict[str, Entry] = {}
        for name, entry in store.entries.items():
            if name.endswith(BLOCKS):
                if len(entry.shape) < 3 or entry.dtype != torch.uint8:
                    raise WeightError(f"tensor '{name}' is no block of packed bytes; the file is damaged")
                *front, rows, groups, width = entry.shape
                scales = store.entries.get(name.removesuffix(BLOCKS) + SCALES)
                if scales is None or scales.shape != (*front, rows, groups):
                    raise WeightError(f"tensor '{name}' is packed, and its scales are missing or of another shape")
                shape = (*front, groups * width * 2, rows)
                self.entries[name.removesuffix(BLOCKS)] = Entry(shape, torch.bfloat16, "mxfp4")
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in store.entries):
                self.entries[name] = entry

    def read(self, name: str) -> Tensor:
        if name in self.store.entries:
            return self.store.read(name)
        blocks, scales = self.store.read(name + BLOCKS), self.store.read(name + SCALES)
        whole = torch.empty(self.entries[name].shape, dtype=torch.bfloat16)
        values = torch.tensor(E2M1, dtype=torch.bfloat16)
        flat = whole.flatten(0, -3) if whole.ndim > 2 else whole.unsqueeze(0)
        parts = (blocks.flatten(0, -4), scales.flatten(0, -3)) if whole.ndim > 2 else (blocks[None], scales[None])
        for target, packed, power in zip(flat, *parts, strict=True):  # one expert at a time: indices take eight bytes
            pairs = torch.stack((values[(packed & 15).long()], values[(packed >> 4).long()]), -1).flatten(-2)
            scaled = torch.ldexp(pairs, power.int().unsqueeze(-1) - 127)
            target.copy_(scaled.flatten(-2).T)
        return whole

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        for one in (name,) if name in self.store.entries else (name + BLOCKS, name + SCALES):
            self.store.release(one)


class Tiles:
    """`x` in fp8, and `x_scale_inv` with a number for each tile of it."""

    def __init__(self, store: Store, tile: tuple[int, int] = (128, 128)) -> None:
        self.store, self.tile = store, tile
        self.entries: dict[str, Entry] = {}
        for name, entry in store.entries.items():
            if name + TILE_SCALES in store.entries:
                scales = store.entries[name + TILE_SCALES]
                counts = tuple(-(-size // side) for size, side in zip(entry.shape, tile, strict=False))
                if len(entry.shape) != 2 or scales.shape != counts:
                    raise WeightError(f"tensor '{name}' is packed in tiles, and its scales do not fit it")
                self.entries[name] = Entry(entry.shape, torch.bfloat16, "fp8")
            elif not (name.endswith(TILE_SCALES) and name.removesuffix(TILE_SCALES) in store.entries):
                self.entries[name] = entry

    def read(self, name: str) -> Tensor:
        packed = self.store.read(name)
        if name + TILE_SCALES not in self.store.entries:
            return packed
        spread = self.store.read(name + TILE_SCALES).float()
        for axis, side in enumerate(self.tile):  # the last tile may be cut
            spread = spread.repeat_interleave(min(side, packed.shape[axis]), axis).narrow(axis, 0, packed.shape[axis])
        return (packed.float() * spread).to(torch.bfloat16)

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        self.store.release(name)


def _tile(told: Any) -> tuple[int, int]:
    match told:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"config.json's 'weight_block_size' is {told!r}, not two numbers; only fp8 in tiles is unpacked")
