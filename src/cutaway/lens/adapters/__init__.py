"""Model adapters: unwrap checkpoints and compiled models, run a model on tokens, list the sites of a model."""

from typing import Any

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.sites import SiteMap
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer


def unwrap_model(model: Any) -> nn.Module:
    """Return the nn.Module of a checkpoint, or the original module of a compiled one."""
    if not isinstance(model, nn.Module) and isinstance(getattr(model, "model", None), nn.Module):
        model = model.model
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"a {type(model).__name__} is not a model; pass the result of ct.build(…) or ct.load(…), a transformers "
            "model, or another nn.Module"
        )
    return model


def require_cutaway_model(model: Any) -> Transformer:
    """Unwrap the model, and raise if it is not a cutaway model."""
    module = unwrap_model(model)
    if not isinstance(module, Transformer):
        raise InputError(
            f"a {type(module).__name__} is not a cutaway model; pass the result of ct.build(…) or ct.load(…)"
        )
    return module


def run_model(model: Transformer, tokens: Tensor, source: Tensor | None) -> Tensor:
    """Return the logits, or the encoder output if the model has no head."""
    if isinstance(model, EncoderDecoder):
        return model(source, tokens)
    if isinstance(model, EncoderOnly) and model.head is None:
        return model.encode(tokens)
    return model(tokens)


def sites(model: nn.Module) -> SiteMap:
    """Return all sites of a model by name, in execution order.

    A transformers model has the sites that its family's weight mapping locates. Any other module has the paths of its
    submodules, with `.in` and `.out`.
    """
    if isinstance(model, Transformer):
        return cutaway_sites(model)
    # Imported here because it imports all families, which most traces do not need.
    from cutaway.lens.adapters.transformers import transformers_sites

    return transformers_sites(model)
