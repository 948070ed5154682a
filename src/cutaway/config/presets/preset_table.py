"""Types and constants that the preset tables share."""

from collections.abc import Callable

from cutaway.config.attention import Projection
from cutaway.config.transformer import Config

PresetTable = dict[str, Callable[[], Config]]
"""Preset name → function that builds the configuration."""

ALL_BIASES: tuple[Projection, ...] = ("q", "k", "v", "o")
QKV_BIASES: tuple[Projection, ...] = ("q", "k", "v")
