"""How others store the same model: one declarative table a family, read in both directions."""

from cutaway.families.registry import families, family_for, family_of, read_config

__all__ = ["families", "family_for", "family_of", "read_config"]
