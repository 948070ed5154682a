"""Presets: configurations of published models by name, one builder per family and one row per size."""

from functools import cache

from cutaway.callable_module import make_callable
from cutaway.config.presets import (
    decoders_gemma,
    decoders_gpt2,
    decoders_llama,
    decoders_moe,
    decoders_parallel_residual,
    encoder_decoders,
    encoders,
    tiny,
)
from cutaway.config.presets.preset_table import PresetTable
from cutaway.config.transformer import Config
from cutaway.errors import ConfigError
from cutaway.pretrained import list_pretrained

PRESET_TABLES = (
    decoders_gpt2.PRESETS,
    decoders_parallel_residual.PRESETS,
    decoders_llama.PRESETS,
    decoders_gemma.PRESETS,
    decoders_moe.PRESETS,
    encoders.PRESETS,
    encoder_decoders.PRESETS,
    tiny.PRESETS,
)
PRESETS: PresetTable = {name: make for table in PRESET_TABLES for name, make in table.items()}


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


@cache
def build_preset(name: str) -> Config:
    """Build the configuration of a preset."""
    if name not in PRESETS:
        import difflib  # imported only for the error message

        near = difflib.get_close_matches(name, [*list_pretrained(), *PRESETS], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`cutaway presets` lists them"
        raise ConfigError(f"there is no preset or file named '{name}'; {hint}")
    return PRESETS[name]()


__all__ = ["PRESETS", "build_preset", "presets"]

make_callable(__name__, presets)
