"""Models without a published size, and unconfirmed estimates of their sizes, read from `unpublished_sizes.toml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cutaway.config.serialization import path_satisfies
from cutaway.errors import InputError
from cutaway.size.units import format_count


@dataclass(frozen=True, kw_only=True)
class ParameterEstimate:
    """An estimate of a number of parameters that the developer has not confirmed."""

    parameters: float
    active: float | None = None
    """Parameters that are used per token."""
    layers: int | None = None
    experts: int | None = None
    basis: str
    """What the estimate rests on: 'report', 'press report', 'throughput', or 'secondary' (cites another estimate)."""
    source: str
    date: str
    url: str
    note: str = ""

    def __str__(self) -> str:
        counts = [f"about {format_count(self.parameters)} parameters"]
        counts += [f"{format_count(self.active)} active"] if self.active else []
        counts += [f"{self.layers} layers"] if self.layers else []
        counts += [f"{self.experts} experts"] if self.experts else []
        return f"{', '.join(counts)} ({self.source}, {self.date}, {self.url})"


@dataclass(frozen=True, kw_only=True)
class UnpublishedSize:
    """A model whose size the developer has not published."""

    name: str
    title: str
    developer: str
    released: str
    estimates: tuple[ParameterEstimate, ...]
    aliases: tuple[str, ...] = ()
    checked: str


def list_unpublished_sizes() -> tuple[UnpublishedSize, ...]:
    """List all models of unpublished_sizes.toml."""
    return tuple(_models().values())


def find_unpublished_size(name: str) -> UnpublishedSize | None:
    """Look up a model by name, title or alias. Case, spaces and punctuation are ignored."""
    return _name_index().get(_normalize_name(name))


def check_size_is_published(source: object) -> None:
    """Raise an error with the estimates if `source` is the name of a model without a published size."""
    if not isinstance(source, str) or (model := find_unpublished_size(source)) is None:
        return
    if path_satisfies(Path(source), Path.exists):
        return
    problem = f"the size of {model.title} is not published by {model.developer}, so it cannot be computed"
    estimates = "; ".join(map(str, model.estimates))
    hint = "use a published model (`cutaway presets`), or a config file with numbers of your choice"
    raise InputError(f"{problem}; unconfirmed estimates: {estimates}; {hint}")


def _normalize_name(name: str) -> str:
    return "".join(re.findall("[a-z0-9]+", name.lower()))


@cache
def _models() -> Mapping[str, UnpublishedSize]:
    import tomllib  # slower to import than this module

    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    models = {}
    for name, fields in tables.items():
        estimates = tuple(ParameterEstimate(**estimate) for estimate in fields.pop("estimates"))
        models[name] = UnpublishedSize(name=name, estimates=estimates, aliases=tuple(fields.pop("aliases")), **fields)
    return models


@cache
def _name_index() -> Mapping[str, UnpublishedSize]:
    """Models by normalized name, title and alias."""
    return {
        _normalize_name(name): model
        for model in _models().values()
        for name in (model.name, model.title, *model.aliases)
    }
