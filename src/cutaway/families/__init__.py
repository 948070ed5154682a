"""Model families: load, save and verify checkpoints of other libraries from one declarative table per family."""

from cutaway.families.registry import config_from_hf, families, find_family, resolve_family

__all__ = ["config_from_hf", "families", "find_family", "resolve_family"]
