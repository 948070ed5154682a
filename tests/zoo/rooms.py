"""Every file of bugs."""

from importlib import import_module

NAMES = ("causality", "masks", "rows", "cache", "writing", "state", "comparison")
ROOMS = [import_module(f"zoo.{name}") for name in NAMES]
