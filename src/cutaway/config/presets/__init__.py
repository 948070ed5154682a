"""Published models by name. A preset is made when it is asked for, from one builder a family and one row a size."""

from functools import cache

from cutaway.callable_module import make_callable
from cutaway.config.presets import (
    decoders_classic,
    decoders_gemma,
    decoders_kin,
    decoders_llama,
    decoders_moe,
    decoders_parallel,
    encoder_decoders,
    encoders,
    tiny,
)
from cutaway.config.presets.table import Table
from cutaway.config.transformer import Config
from cutaway.errors import ConfigError
from cutaway.shipped import shipped

TABLES = (
    decoders_classic.PRESETS,
    decoders_parallel.PRESETS,
    decoders_llama.PRESETS,
    decoders_kin.PRESETS,
    decoders_gemma.PRESETS,
    decoders_moe.PRESETS,
    encoders.PRESETS,
    encoder_decoders.PRESETS,
    tiny.PRESETS,
)
PRESETS: Table = {name: make for table in TABLES for name, make in table.items()}


def presets() -> list[str]:
    """The names that `config` knows."""
    return list(PRESETS)


@cache
def preset(name: str) -> Config:
    """The preset of this name."""
    if name not in PRESETS:
        import difflib  # only mistakes need it

        near = difflib.get_close_matches(name, [*shipped(), *PRESETS], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`cutaway presets` lists them"
        raise ConfigError(f"there is no preset or file named '{name}'; {hint}")
    return PRESETS[name]()


__all__ = ["PRESETS", "preset", "presets"]

make_callable(__name__, presets)
