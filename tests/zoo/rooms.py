"""Every file of bugs."""

from importlib import import_module

NAMES = (
    "causality",
    "rows",
    "masks",
    "cache",
    "writing",
    "attention",
    "peers_bugs",
    "positions",
    "scale",
    "rope",
    "state",
    "loss",
    "learning",
    "health",
    "comparison",
)
ROOMS = [import_module(f"zoo.{name}") for name in NAMES]
