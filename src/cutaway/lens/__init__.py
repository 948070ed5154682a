"""Look inside a model."""

from cutaway.lens.journey import Journey, Stage, follow

__all__ = ["Journey", "Stage", "follow"]
