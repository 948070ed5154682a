"""`ActivationDataset`: activations on disk, with random access by token and shuffled batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cutaway.argument_checks import check_positive_int, check_seed
from cutaway.errors import InputError
from cutaway.lens.activations.index import TOKEN_KEYS, read_index

_CHUNK_TOKENS = 256
"""Number of consecutive tokens that `batches` reads at once."""


@dataclass(frozen=True)
class ActivationBatch:
    """Activations of n tokens, with the tokens' ids, positions in their rows and sequences."""

    activations: dict[str, Tensor]
    """Site → (n, …)."""
    tokens: Tensor
    positions: Tensor
    sequences: Tensor

    def __getitem__(self, site: str) -> Tensor:
        return self.activations[site]

    def __len__(self) -> int:
        return len(self.tokens)


class ActivationDataset:
    """Activations that `collect_activations` has written. Tokens are numbered in the order of the corpus.

    `dataset[5]`, `dataset[10:20]` and `dataset[[3, 8]]` return an `ActivationBatch`. The shards are memory-mapped.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.index = read_index(self.directory)
        self.sites = tuple(self.index.sites)
        sizes = torch.tensor([shard.num_tokens for shard in self.index.shards], dtype=torch.long)
        self._ends = sizes.cumsum(0)
        self._shards: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return self.index.num_tokens

    def __repr__(self) -> str:
        state = "" if self.index.complete else ", incomplete"
        sites = ", ".join(f"{name} {tuple(info.shape)}" for name, info in self.index.sites.items())
        return f"ActivationDataset('{self.directory}', {len(self):,} tokens{state}, {self.index.dtype}: {sites})"

    def resolve_site(self, site: str | None) -> str:
        """Return the full name of a site, from its name or a suffix. None is the only site of the dataset."""
        matches = [name for name in self.sites if site in (None, name) or name.endswith(f".{site}")]
        if len(matches) != 1:
            raise InputError(f"site is {site!r}, which is not one of the dataset's sites; pass {', '.join(self.sites)}")
        return matches[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> ActivationBatch:
        if isinstance(index, slice):
            index = torch.arange(len(self))[index]
        elif isinstance(index, int):
            index = [index]
        return self.read(torch.as_tensor(index))

    def read(self, indices: Tensor, sites: Sequence[str] | None = None) -> ActivationBatch:
        """Return the tokens with these indices, (n,), in this order. By default, all sites are read."""
        size = len(self)
        if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise InputError(f"indices must be integers of shape (n,), not {indices.dtype} of {tuple(indices.shape)}")
        if len(indices) and not -size <= int(indices.min()) <= int(indices.max()) < size:
            raise InputError(f"a token index is out of range; the dataset has {size} tokens, so pass 0 to {size - 1}")
        indices = indices.long() % max(size, 1)
        names = self.sites if sites is None else [self.resolve_site(site) for site in sites]
        shard_of_token = torch.searchsorted(self._ends, indices, right=True)
        columns: dict[str, Tensor] = {}
        for number in shard_of_token.bincount().nonzero()[:, 0].tolist():
            at = (shard_of_token == number).nonzero()[:, 0]
            local = indices[at] - (int(self._ends[number - 1]) if number else 0)
            for key in (*names, *TOKEN_KEYS):
                part = self._open_shard(number)[key].index_select(0, local)
                if key not in columns:
                    columns[key] = part.new_empty(len(indices), *part.shape[1:])
                columns[key][at] = part
        if not columns:
            columns = {key: self._open_shard(0)[key][:0] for key in (*names, *TOKEN_KEYS)}
        tokens, positions, sequences = (columns[key].long() for key in TOKEN_KEYS)
        return ActivationBatch({name: columns[name] for name in names}, tokens, positions, sequences)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        sites: Sequence[str] | None = None,
        buffer_tokens: int = 65536,
        drop_last: bool = False,
    ) -> Iterator[ActivationBatch]:
        """Yield all tokens once in batches.

        With `shuffle`, chunks of consecutive tokens are read in random order into a buffer of `buffer_tokens` tokens,
        which is then permuted: reads are sequential and the memory does not depend on the size of the dataset. A
        dataset with no more tokens than the buffer is permuted uniformly.
        """
        check_positive_int("batch_size", batch_size)
        check_positive_int("buffer_tokens", buffer_tokens)
        check_seed(seed)
        size, generator = len(self), torch.Generator().manual_seed(seed)
        chunk = _CHUNK_TOKENS if shuffle else batch_size
        starts = torch.arange(0, size, chunk)
        if shuffle:
            starts = starts[torch.randperm(len(starts), generator=generator)]
        buffer_size = max(buffer_tokens // chunk, -(-batch_size // chunk)) if shuffle else 1
        rest = torch.empty(0, dtype=torch.long)
        for first in range(0, len(starts), buffer_size):
            group = starts[first : first + buffer_size]
            indices = torch.cat([rest, *(torch.arange(start, min(start + chunk, size)) for start in group.tolist())])
            if shuffle:
                indices = indices[torch.randperm(len(indices), generator=generator)]
            usable = len(indices) // batch_size * batch_size
            rest = indices[usable:]
            buffer = self.read(indices[:usable].sort().values, sites) if usable else None
            if buffer is not None:
                order = indices[:usable].argsort().argsort()
                for at in range(0, usable, batch_size):
                    yield _select_tokens(buffer, order[at : at + batch_size])
        if len(rest) and not drop_last:
            yield self.read(rest, sites)

    def sequence_context(self, index: int, before: int = 10, after: int = 5) -> tuple[Tensor, int]:
        """Return the ids of the tokens around a token in its sequence, and the index of the token among them."""
        start, end = max(index - before, 0), min(index + after + 1, len(self))
        window = self.read(torch.arange(start, end), [])
        same = window.sequences == window.sequences[index - start]
        return window.tokens[same], int(same[: index - start].sum())

    def verify(self) -> None:
        """Compare the checksum of each shard with the index. Raise if a file is missing or differs."""
        for shard in self.index.shards:
            path = self.directory / shard.file
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise InputError(f"cannot read '{path}': {error.strerror}; collect the activations again") from None
            if digest != shard.sha256:
                raise InputError(f"'{path}' differs from its checksum in the index; collect the activations again")

    def _open_shard(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a shard, which are memory-mapped: values are read from the disk when used."""
        if number not in self._shards:
            path = self.directory / self.index.shards[number].file
            try:
                with safe_open(path, "pt") as file:
                    self._shards[number] = {key: file.get_tensor(key) for key in (*self.sites, *TOKEN_KEYS)}
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot read '{path}': {error}; collect the activations again") from None
        return self._shards[number]


def _select_tokens(batch: ActivationBatch, indices: Tensor) -> ActivationBatch:
    activations = {name: value.index_select(0, indices) for name, value in batch.activations.items()}
    return ActivationBatch(activations, batch.tokens[indices], batch.positions[indices], batch.sequences[indices])
