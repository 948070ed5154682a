"""The Transformer with its side open. Public names are imported when first used: `import cutaway` needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.check.run import check as check
    from cutaway.config.presets import presets as presets
    from cutaway.config.source import config as config
    from cutaway.config.transformer import Config as Config
    from cutaway.errors import CutawayError as CutawayError
    from cutaway.families.checkpoint import Checkpoint as Checkpoint
    from cutaway.families.load import load as load
    from cutaway.families.save import save as save
    from cutaway.generate.texts import generate as generate
    from cutaway.lens.edit import edit as edit
    from cutaway.lens.trace import trace as trace
    from cutaway.measure.text import measure as measure
    from cutaway.model import Cache as Cache
    from cutaway.model import Transformer as Transformer
    from cutaway.model import build as build
    from cutaway.serve.notebook import view as view
    from cutaway.size.sizing import size as size
    from cutaway.train.start import train as train

_HOMES = {
    "Cache": "cutaway.model",
    "Checkpoint": "cutaway.families.checkpoint",
    "Config": "cutaway.config",
    "CutawayError": "cutaway.errors",
    "Transformer": "cutaway.model",
    "build": "cutaway.model",
    "edit": "cutaway.lens.edit",
    "load": "cutaway.families.load",
    "presets": "cutaway.config.presets",
    "save": "cutaway.families.save",
    "trace": "cutaway.lens.trace",
    "view": "cutaway.serve.notebook",
}

__all__ = [
    "Cache",
    "Checkpoint",
    "Config",
    "CutawayError",
    "Transformer",
    "build",
    "check",
    "config",
    "edit",
    "generate",
    "load",
    "measure",
    "presets",
    "save",
    "size",
    "trace",
    "train",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in ("check", "config", "generate", "measure", "size", "train"):  # rooms that can be called: ct.config(...)
        return import_module(f"cutaway.{name}")
    if name == "__version__":
        from importlib.metadata import version  # takes longer than the rest of this file

        return version("cutaway")
    if name not in _HOMES:
        raise AttributeError(f"cutaway has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
