"""What the tables of presets have in common."""

from collections.abc import Callable

from cutaway.config.attention import Projection
from cutaway.config.transformer import Config

Table = dict[str, Callable[[], Config]]
"""Names, and what makes each configuration when it is asked for."""

ALL_BIASES: tuple[Projection, ...] = ("q", "k", "v", "o")
QKV_BIASES: tuple[Projection, ...] = ("q", "k", "v")
