"""cutaway: build, train, run, inspect, size and check Transformers. Public names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutaway.check.api import check
    from cutaway.config.presets import presets
    from cutaway.config.serialization import config
    from cutaway.config.transformer import Config
    from cutaway.errors import CutawayError
    from cutaway.evaluate.causal_lm import evaluate_causal_lm as evaluate
    from cutaway.families.checkpoint import Checkpoint
    from cutaway.families.load import load
    from cutaway.families.peft_format import save_adapter
    from cutaway.families.save import save
    from cutaway.generate.api import generate
    from cutaway.generate.classify import classify
    from cutaway.generate.embed import embed
    from cutaway.lens.edit import edit
    from cutaway.lens.trace import trace
    from cutaway.model import Cache, Transformer, build
    from cutaway.serve.notebook import view
    from cutaway.size.estimate import size
    from cutaway.train.trainer.launch import train

_LAZY_EXPORTS = {
    "Cache": "cutaway.model",
    "Checkpoint": "cutaway.families.checkpoint",
    "Config": "cutaway.config",
    "CutawayError": "cutaway.errors",
    "Transformer": "cutaway.model",
    "build": "cutaway.model",
    "classify": "cutaway.generate.classify",
    "edit": "cutaway.lens.edit",
    "embed": "cutaway.generate.embed",
    "load": "cutaway.families.load",
    "presets": "cutaway.config.presets",
    "save_adapter": "cutaway.families.peft_format",
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
    "classify",
    "config",
    "edit",
    "embed",
    "generate",
    "load",
    "evaluate",
    "presets",
    "save",
    "save_adapter",
    "size",
    "trace",
    "train",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in ("check", "config", "generate", "evaluate", "size", "train"):  # callable packages: ct.config(...)
        return import_module(f"cutaway.{name}")
    if name == "__version__":
        from importlib.metadata import version  # this import takes longer than the rest of this file

        return version("cutaway")
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"cutaway has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_LAZY_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
