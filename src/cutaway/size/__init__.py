"""What a configuration costs, in closed forms. No torch here."""

from cutaway.size.params import LayerParams, Params, count

__all__ = ["LayerParams", "Params", "count"]
