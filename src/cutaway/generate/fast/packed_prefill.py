"""Prefill steps on a GPU without padding: the chunks of several sequences are one batch of tokens."""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.generate.fast.cuda_graphs import PrefillGraphRunner
from cutaway.generate.fast.gpu_decode_model import get_gpu_decode_model
from cutaway.generate.fast.prefill_attention import TILE_SIZE
from cutaway.model import DecoderOnly
from cutaway.model.masks import EMPTY_POSITION


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in a batch."""

    row: int
    """Row of the KV cache."""
    start: int
    """Position of the first token."""
    length: int


def query_tiles(chunks: Sequence[Chunk]) -> list[tuple[int, int, int, int]]:
    """(index of the first token in the batch, number of queries, position of the first, cache row) of each tile.

    Tiles with the most keys are first, so that the last programs to run are short."""
    tiles, first = [], 0
    for chunk in chunks:
        for start in range(0, chunk.length, TILE_SIZE):
            tiles.append((first + start, min(TILE_SIZE, chunk.length - start), chunk.start + start, chunk.row))
        first += chunk.length
    return sorted(tiles, key=lambda tile: -tile[2])


class PrefillBatch(NamedTuple):
    """A batch of chunks, as lists with one entry per token, and its query tiles."""

    tokens: list[int]
    positions: list[int]
    rows: list[int]
    """Row of the KV cache of each token."""
    tiles: list[tuple[int, int, int, int]]

    @staticmethod
    def build(chunks: Sequence[Chunk], tokens: Sequence[Sequence[int]]) -> "PrefillBatch":
        return PrefillBatch(
            list(chain.from_iterable(tokens)),
            [position for chunk in chunks for position in range(chunk.start, chunk.start + chunk.length)],
            [chunk.row for chunk in chunks for _ in range(chunk.length)],
            query_tiles(chunks),
        )

    def pad(self, size: int, num_tiles: int) -> "PrefillBatch":
        """Add padding tokens up to `size`, and tiles without queries up to `num_tiles`."""
        count = size - len(self.tokens)
        return PrefillBatch(
            self.tokens + [0] * count,
            self.positions + [EMPTY_POSITION] * count,
            self.rows + [0] * count,
            self.tiles + [(0, 0, 0, 0)] * (num_tiles - len(self.tiles)),
        )


class PackedPrefill:
    """Runs prefill steps with the blocks of the GPU decode model, as CUDA graphs if they have few tokens.

    The decode model shares the weights of the model. Hidden states, keys and values of padding do not exist, except in
    CUDA graphs, which write those of padding to the null page of a paged cache."""

    def __init__(self, model: DecoderOnly, cache: BatchKVCache) -> None:
        self.model, self.cache = model, cache
        self.graphs = None if cache.page_table is None else PrefillGraphRunner(self.forward, model.device)

    @cached_property
    def decode_model(self) -> DecoderOnly:
        return get_gpu_decode_model(self.model)

    def __call__(
        self, first_row: int, chunks: Sequence[Sequence[int]], num_computed: Sequence[int]
    ) -> Sequence[Float[Tensor, "length d"]]:
        """Run the chunks and write their keys and values to the cache: see `ModelRunner.prefill`."""
        cache, lengths = self.cache, list(map(len, chunks))
        rows = range(first_row, first_row + len(chunks))
        packed = list(map(Chunk, rows, num_computed, lengths))
        batch = PrefillBatch.build(packed, chunks)
        x = None if self.graphs is None else self.graphs(batch)
        if x is None:
            tiles = self._to_device(batch.tiles, torch.int32)
            x = self.forward(self._to_device(batch[:3], torch.long), tiles)
        seq_lens = self._to_device([chunk.start + chunk.length for chunk in packed], torch.long)
        cache.seq_lens[rows.start : rows.stop] = seq_lens
        write_end = cache.write_end[rows.start : rows.stop]
        torch.maximum(write_end, seq_lens, out=write_end)
        return torch.split(x[: len(batch.tokens)], lengths)

    def forward(
        self, columns: Int[Tensor, "3 N"], tiles: Int[Tensor, "n 4"], *, has_padding: bool = False
    ) -> Float[Tensor, "N d"]:
        """Hidden states of a batch of chunks. `columns` are tokens, positions and cache rows: see `PrefillBatch`."""
        tokens, positions, rows = columns
        cache = self.cache
        view = cache.view_chunks(positions, rows, tiles, max_len=cache.num_slots, has_padding=has_padding)
        stack = self.decode_model.stacks["decoder"]
        token_positions, slot_mappings = view.assign_slots(1, None)
        x = stack(tokens.unsqueeze(-1), token_positions, cache=view, slot_mappings=slot_mappings)
        if isinstance(stack.final_norm, nn.Identity):  # a part of the head of the decode model
            x = self.model.stacks["decoder"].final_norm(x)
        return x.squeeze(1)

    def _to_device(self, data: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Tensor on the GPU. The copy is asynchronous, so that the host does not wait for steps that are running."""
        return torch.tensor(data, dtype=dtype, pin_memory=True).to(self.model.device, non_blocking=True)
