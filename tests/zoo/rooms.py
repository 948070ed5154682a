"""Every file of bugs."""

from importlib import import_module

ROOMS = [import_module(f"zoo.{name}") for name in ("causality", "state", "health", "comparison")]
