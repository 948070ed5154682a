"""Imports every module of seeded bugs, which registers them."""

from importlib import import_module

BUG_MODULE_NAMES = (
    "causality",
    "embedding",
    "batching",
    "masks_and_padding",
    "kv_cache",
    "generation",
    "attention",
    "transformers_models",
    "positions",
    "config_and_weights",
    "loss",
    "training",
    "activations",
    "parity",
    "zero_initialization",
    "length_multiple",
    "other_styles",
)
BUG_MODULES = [import_module(f"support.seeded_bugs.{name}") for name in BUG_MODULE_NAMES]
