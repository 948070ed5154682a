"""Index of an activation dataset: `index.json` with the model, the sites and the shards."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cutaway.bounded_files import read_json_object
from cutaway.errors import InputError
from cutaway.user_files import write_text_atomically

INDEX_FILE = "index.json"
FORMAT = "cutaway-activations"
VERSION = 1
TOKEN_KEYS = ("tokens", "positions", "sequences")
"""Tensors in each shard beside the activations: token id, position in the row, and index of the sequence."""
_FINGERPRINT_VALUES = 256


@dataclass(frozen=True)
class SiteInfo:
    """Axes and shape of the activation of one token at a site."""

    axes: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """A safetensors file with the activations of consecutive batches."""

    file: str
    num_tokens: int
    num_batches: int
    sha256: str


@dataclass
class Index:
    """Contents of index.json. The fields before `shards` are the settings, which a resumed run must have too."""

    model: str
    """Class, number of parameters and a hash of some of the weights."""
    sites: dict[str, SiteInfo]
    dtype: str
    seq_len: int
    batch_size: int
    packing: bool
    tokens_per_shard: int
    """Minimum number of tokens of a shard, except for the last one. A shard has whole batches."""
    max_tokens: int | None
    shards: list[Shard] = field(default_factory=list)
    complete: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_batches(self) -> int:
        return sum(shard.num_batches for shard in self.shards)

    def write(self, directory: Path) -> None:
        data = {"format": FORMAT, "version": VERSION} | asdict(self) | {"num_tokens": self.num_tokens}
        write_text_atomically(directory / INDEX_FILE, json.dumps(data, indent=1) + "\n")

    def check_same_settings(self, other: "Index", directory: Path) -> None:
        """Raise if a run with the settings of `other` cannot continue this dataset."""
        for name in [item.name for item in fields(self)][:-2]:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "sites":
                mine, theirs = list(mine), list(theirs)
            if mine != theirs:
                problem = f"'{directory}' has activations with {name} = {mine!r}, not {theirs!r}"
                raise InputError(f"{problem}, so it cannot be resumed; pass the same {name}, or another directory")


def read_index(directory: Path) -> Index:
    path = directory / INDEX_FILE
    data = read_json_object(path, InputError)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise InputError(f"'{path}' is not an index of {FORMAT} version {VERSION}; write it with collect_activations")
    try:
        return _parse_index(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"'{path}' is not a valid index ({type(error).__name__}: {error})"
        raise InputError(f"{problem}; write it with collect_activations") from None


def _parse_index(data: dict[str, Any]) -> Index:
    sites = {name: SiteInfo(site["axes"], tuple(site["shape"])) for name, site in data["sites"].items()}
    shards = [Shard(**shard) for shard in data["shards"]]
    if any(Path(shard.file).name != shard.file for shard in shards):
        raise ValueError("the name of a shard is a path")
    names = {item.name for item in fields(Index)} - {"sites", "shards"}
    return Index(sites=sites, shards=shards, **{name: data[name] for name in names})


def describe_model(model: nn.Module) -> str:
    """Return the class, the number of parameters, and a hash of the first values of each parameter."""
    digest, total = hashlib.sha256(), 0
    for name, parameter in model.named_parameters():
        total += math.prod(parameter.shape)
        values: Tensor = parameter.detach().flatten()[:_FINGERPRINT_VALUES].float().cpu()
        digest.update(name.encode() + values.numpy().tobytes())
    digest.update(str(getattr(model, "active_adapter", None) or "").encode())
    return f"{type(model).__name__}, {total:,} parameters, {digest.hexdigest()[:16]}"
