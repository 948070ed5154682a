"""Engines of a model on several processes: rank 0 runs the engine, and the others repeat its forward passes.

Requests, scheduling, sampling and the allocation of pages are on rank 0 only. Before each forward pass, rank 0 sends
its inputs to the other ranks, its workers: tokens, mask, and the lengths and pages of the rows. A worker has a KV
cache of the same layout for its own heads. Operations that change keys and values outside of a forward pass are
recorded and sent with the next one.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cutaway.errors import InputError
from cutaway.generate.engine.kv_cache import BatchKVCache
from cutaway.model import Transformer
from cutaway.model.parallel.process_group import RankFailedError, TensorParallel

T = TypeVar("T")
RecordedCall = tuple[str, tuple[Any, ...]]
RECORDED_METHODS = ("swap_rows", "zero_row", "copy_page")
"""Methods of the cache that change keys and values, or move them between rows."""


class CacheUpdate(NamedTuple):
    """What happened to the caches since the last message. `options`: arguments of a new BatchKVCache, or None."""

    cache_id: int
    options: dict[str, Any] | None
    calls: list[RecordedCall]
    freed: list[int]
    """Caches that rank 0 has released."""


class ForwardPass(NamedTuple):
    """A forward pass over rows of a cache. Its tokens, mask, lengths and pages follow as one tensor."""

    cache: CacheUpdate
    first_row: int
    num_rows: int
    num_tokens: int
    max_len: int
    has_mask: bool
    logits: bool
    """Whether logits are computed after the hidden states."""


class SourceEncoding(NamedTuple):
    """Arguments of `ModelRunner.encode_source`."""

    cache: CacheUpdate
    row: int
    source_tokens: list[int]
    decoder_tokens: list[int]


class HeadPass(NamedTuple):
    """Logits of hidden states, which follow as a tensor."""

    shape: tuple[int, ...]


class Result(NamedTuple):
    """The end of the work that ranks have followed: its return value or its error."""

    value: Any
    error: Exception | None


class _RecordedKVCache(BatchKVCache):
    """KV cache of rank 0, which records the calls that its workers must repeat."""

    recorded_calls: list[RecordedCall]

    def swap_rows(self, a: int, b: int) -> None:
        self.recorded_calls.append(("swap_rows", (a, b)))
        super().swap_rows(a, b)

    def zero_row(self, row: int, page_ids: Sequence[int] = ()) -> None:
        self.recorded_calls.append(("zero_row", (row, list(page_ids))))
        super().zero_row(row, page_ids)

    def copy_page(self, source: int, target: int) -> None:
        self.recorded_calls.append(("copy_page", (source, target)))
        super().copy_page(source, target)


class Workers:
    """The workers of one engine, on rank 0."""

    def __init__(self, ranks: TensorParallel, cache: BatchKVCache) -> None:
        self.ranks = ranks
        self.cache_id = ranks.num_caches = ranks.num_caches + 1
        self.new_cache_options: dict[str, Any] | None = _cache_options(cache)
        self.calls: list[RecordedCall] = []
        cache.__class__ = _RecordedKVCache
        cache.recorded_calls = self.calls  # type: ignore[attr-defined]
        weakref.finalize(cache, ranks.freed_caches.append, self.cache_id)

    @contextmanager
    def forward(self, view: BatchKVCache, tokens: Tensor, mask: Tensor | None, *, logits: bool) -> Iterator[None]:
        """Context of a forward pass over rows of the cache, which the workers repeat."""
        with self.ranks.running():
            num_rows, num_tokens = tokens.shape
            has_mask = mask is not None
            self.ranks.broadcast_object(
                ForwardPass(self._update(), view.first_row, num_rows, num_tokens, view.max_len, has_mask, logits)
            )
            self.ranks.broadcast(torch.cat([part.reshape(-1).long() for part in _inputs(view, tokens, mask)]))
            yield

    @contextmanager
    def encode_source(self, row: int, source_tokens: Sequence[int], decoder_tokens: Sequence[int]) -> Iterator[None]:
        """Context in which a source is encoded, which the workers repeat."""
        with self.ranks.running():
            message = SourceEncoding(self._update(), row, list(source_tokens), list(decoder_tokens))
            self.ranks.broadcast_object(message)
            yield

    @contextmanager
    def compute_logits(self, x: Tensor) -> Iterator[None]:
        """Context in which logits of hidden states are computed, which the workers repeat."""
        with self.ranks.running():
            self.ranks.broadcast_object(HeadPass(tuple(x.shape)))
            self.ranks.broadcast(x.contiguous())
            yield

    def _update(self) -> CacheUpdate:
        update = CacheUpdate(self.cache_id, self.new_cache_options, [*self.calls], [*self.ranks.freed_caches])
        self.new_cache_options = None
        self.calls.clear()
        self.ranks.freed_caches.clear()
        return update


def _inputs(view: BatchKVCache, tokens: Tensor, mask: Tensor | None) -> list[Tensor]:
    return [part for part in (tokens, mask, view.seq_lens, view.write_end, view.page_table) if part is not None]


def _cache_options(cache: BatchKVCache) -> dict[str, Any]:
    """Arguments of `BatchKVCache` for a cache of the same layout."""
    is_paged = cache.page_table is not None
    memory = cache.memory_positions
    return {
        "batch_size": cache.batch_size,
        "num_slots": cache.num_slots,
        "implementation": cache.implementation,
        "dtype": cache.paged_layers[0].keys.values.dtype,
        "chunk_size": cache.chunk_size,
        "num_pages": cache.num_pages - 1 if is_paged else None,  # without the null page
        "max_source_len": 0 if memory is None else memory.position.shape[-1],
    }


def get_workers(model: Transformer, cache: BatchKVCache) -> Workers | None:
    """The workers of an engine; None if the model is in one process, or if this process is a worker."""
    ranks = model.tensor_parallel
    if ranks is None or ranks.is_worker:
        return None
    if not ranks.has_workers:
        raise InputError(
            f"the model is split over {ranks.size} processes, of which only rank 0 can run an engine, and the"
            " others are its workers; call ct.generate on all of them"
        )
    return Workers(ranks, cache)


def run_on_rank_0(model: Transformer, run: Callable[[], T]) -> T:
    """Call `run` and return its result. If several processes of a script call this, `run` is called on rank 0 only.

    The other ranks repeat its forward passes, and return the same result or raise the same error."""
    ranks = model.tensor_parallel
    if ranks is None or ranks.has_workers:
        return run()
    if ranks.rank > 0:
        result = run_worker_loop(model)
    else:
        ranks.has_workers = True
        try:
            result = Result(run(), None)
        except RankFailedError:
            raise
        except Exception as error:
            if ranks.has_failed:  # the other ranks wait in the forward pass that failed here
                raise
            result = Result(None, error)
        finally:
            ranks.has_workers = False
        ranks.broadcast_object(result)
    if result.error is not None:
        raise result.error
    value: T = result.value
    return value


@torch.no_grad()
def run_worker_loop(model: Transformer) -> Result:
    """Repeat the forward passes of rank 0's engines until it sends a result."""
    from cutaway.generate.engine.model_runner import ModelRunner

    ranks = model.tensor_parallel
    assert ranks is not None
    runners: dict[int, ModelRunner] = {}
    ranks.is_worker = True
    try:
        while not isinstance(message := ranks.broadcast_object(None), Result):
            with ranks.running():
                _repeat(message, model, ranks, runners)
    finally:
        ranks.is_worker = False
    return message


def _repeat(message: Any, model: Transformer, ranks: TensorParallel, runners: dict[int, Any]) -> None:
    from cutaway.generate.engine.model_runner import ModelRunner

    if isinstance(message, HeadPass):
        x = torch.empty(message.shape, dtype=model.dtype, device=model.device)
        model.lm_head(ranks.broadcast(x))
        return
    update: CacheUpdate = message.cache
    for cache_id in update.freed:
        runners.pop(cache_id, None)
    if update.options is not None:
        with torch.inference_mode(False):
            cache = BatchKVCache(model, **update.options)
            runners[update.cache_id] = ModelRunner(model, cache, compile=False)
    runner = runners[update.cache_id]
    cache = runner.cache
    for name, arguments in update.calls:
        assert name in RECORDED_METHODS
        getattr(cache, name)(*arguments)
    if isinstance(message, SourceEncoding):
        runner.encode_source(message.row, message.source_tokens, message.decoder_tokens)
        return
    assert isinstance(message, ForwardPass)
    view = cache.view_rows(message.first_row, message.first_row + message.num_rows, max_len=message.max_len)
    tokens = torch.empty(message.num_rows, message.num_tokens, dtype=torch.long, device=model.device)
    mask = torch.empty_like(tokens) if message.has_mask else None
    targets = _inputs(view, tokens, mask)
    packed = ranks.broadcast(torch.empty(sum(part.numel() for part in targets), dtype=torch.long, device=model.device))
    for target, values in zip(targets, torch.split(packed, [part.numel() for part in targets]), strict=True):
        target.copy_(values.view(target.shape))
    run = runner.forward_logits if message.logits else runner.forward_hidden
    run(model, tokens, None if mask is None else mask.bool(), view)
