"""Shard writer: writes activations in a background thread while the model computes the next batch."""

import queue
import threading
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from cutaway.lens.activations.index import Index, Shard, SiteInfo
from cutaway.lens.activations.shard_file import write_safetensors

_MAX_QUEUED_BATCHES = 4
"""Number of batches that may wait for the writer. It bounds the memory if writing is slower than the model."""


class RecordedBatch(NamedTuple):
    """Activations of one batch."""

    activations: dict[str, Tensor]
    """Site → (B·T, …), on the model's device, with padding."""
    token_data: dict[str, Tensor]
    """Values of each token that is not padding, (n,), on the CPU."""
    real: Tensor
    """Indices of the n tokens that are not padding, of 0 to B·T − 1."""


class ShardWriter:
    """Context manager with a thread that writes shards. An error in the thread is raised in the next `put`.

    A shard is written to a temporary file, renamed, and then entered in the index, so that the index lists complete
    files only. At the end of the with-block, the last shard is written, unless an exception is raised.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self.directory, self.index = directory, index
        self._queue: queue.Queue[RecordedBatch | None] = queue.Queue(_MAX_QUEUED_BATCHES)
        self._error: BaseException | None = None
        self._batches: list[dict[str, Tensor]] = []
        self._thread = threading.Thread(target=self._run, name="activation-writer", daemon=True)
        self._failed = False

    def __enter__(self) -> "ShardWriter":
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._failed = exc_type is not None
        self._queue.put(None)
        self._thread.join()
        if exc_type is None and self._error is not None:
            raise self._error

    def put(self, batch: RecordedBatch) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(batch)

    def _run(self) -> None:
        num_tokens = 0
        while (batch := self._queue.get()) is not None:
            if self._error is not None:
                continue  # empty the queue, so that `put` does not block
            try:
                self._batches.append(_select_real_tokens(batch))
                num_tokens += len(batch.real)
                if num_tokens >= self.index.tokens_per_shard:
                    self._write_shard()
                    num_tokens = 0
            except BaseException as error:  # raised in the main thread
                self._error = error
        if self._error is None and not self._failed:
            try:
                if self._batches:
                    self._write_shard()
                self.index.complete = True
                self.index.write(self.directory)
            except BaseException as error:
                self._error = error

    def _write_shard(self) -> None:
        batches, self._batches = self._batches, []
        parts = {key: [batch[key] for batch in batches] for key in batches[0]}
        if not self.index.shards:
            self.index.sites = {
                name: SiteInfo(info.axes, tuple(parts[name][0].shape[1:])) for name, info in self.index.sites.items()
            }
        file = f"shard-{len(self.index.shards):05}.safetensors"
        temporary = self.directory / f"{file}.tmp"
        digest = write_safetensors(temporary, parts)
        temporary.replace(self.directory / file)
        self.index.shards.append(Shard(file, sum(map(len, parts["tokens"])), len(batches), digest))
        self.index.write(self.directory)


def _select_real_tokens(batch: RecordedBatch) -> dict[str, Tensor]:
    """Return the activations without padding on the CPU, (n, …), and the values of the tokens."""
    selected = dict(batch.token_data)
    for name, value in batch.activations.items():
        has_padding = len(batch.real) < len(value)
        selected[name] = (value.index_select(0, batch.real.to(value.device)) if has_padding else value).cpu()
    return selected
