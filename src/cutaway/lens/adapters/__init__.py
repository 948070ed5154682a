"""Models that can be looked into: what they come wrapped in, how they are called with a text, where their sites are."""

from typing import Any

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.sites import SiteMap
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer


def unwrap_model(model: Any) -> nn.Module:
    """A checkpoint's model, a compiled one's original."""
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
        model = model.model
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a {type(model).__name__} is no model; give one of ct.build(…) or ct.load(…), one of transformers, or "
            "another nn.Module"
        )
    return model


def require_cutaway_model(model: Any) -> Transformer:
    """The same, for what only a model of cutaway's can be asked."""
    inner = unwrap_model(model)
    if not isinstance(inner, Transformer):
        raise InputError(f"a {type(inner).__name__} is no cutaway model; give one of ct.build(…) or ct.load(…)")
    return inner


def run_model(model: Transformer, tokens: Tensor, source: Tensor | None) -> Tensor:
    """Logits, or the encoder's vectors where there is no head."""
    if isinstance(model, EncoderDecoder):
        return model(source, tokens)
    if isinstance(model, EncoderOnly) and model.head is None:
        return model.encode(tokens)
    return model(tokens)


def sites(model: nn.Module) -> SiteMap:
    """Every site of a model by name, in the order in which values come to them.

    A model of transformers has the sites that its family's table finds in it; any other module has the paths of its
    parts, with `.in` and `.out`.
    """
    if isinstance(model, Transformer):
        return cutaway_sites(model)
    # Imported here: it needs the families' tables, which most traces do not.
    from cutaway.lens.adapters.transformers import transformers_sites

    return transformers_sites(model)
