"""How others store the same model: one declarative table a family, read in both directions."""

from cutaway.families.registry import config_from_hf, families, find_family, resolve_family

__all__ = ["config_from_hf", "families", "find_family", "resolve_family"]
