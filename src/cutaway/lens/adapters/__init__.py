"""Model adapters: unwrap checkpoints and wrapped models, run a model on tokens, list the sites of a model."""

from typing import Protocol

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.adapters.cutaway import cutaway_sites
from cutaway.lens.adapters.described_model import DescribedModel
from cutaway.lens.attached_sites import with_attached_sites
from cutaway.lens.sites import SiteMap
from cutaway.model import EncoderDecoder, Transformer


class HasModel(Protocol):
    """An object with a `model` attribute, such as a checkpoint."""

    @property
    def model(self) -> nn.Module: ...


ModelLike = nn.Module | HasModel | DescribedModel


def unwrap_model(model: ModelLike) -> nn.Module:
    """Return the nn.Module of a checkpoint, the original module of a compiled module, or PEFT's adapted model."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", model)
    module = getattr(module, "_orig_mod", module)
    if not isinstance(module, nn.Module):
        raise InputError(f"a {type(model).__name__} is not a model; pass a checkpoint, a cutaway model or an nn.Module")
    get_base_model = getattr(module, "get_base_model", None)
    if not hasattr(module, "peft_config") or get_base_model is None:
        return module
    if getattr(module.active_peft_config, "is_prompt_learning", False):
        problem = "this PEFT model adds virtual tokens, which change the positions of the text"
        raise InputError(f"{problem}; pass a model with LoRA or another adapter of modules")
    return unwrap_model(get_base_model())


def require_cutaway_model(model: ModelLike) -> Transformer:
    """Unwrap the model, and raise if it is not a cutaway model."""
    module = unwrap_model(model)
    if not isinstance(module, Transformer):
        raise InputError(f"a {type(module).__name__} is not a cutaway model; pass one from ct.build(…) or ct.load(…)")
    return module


def run_model(model: Transformer | DescribedModel, tokens: Tensor, source: Tensor | None) -> Tensor:
    """Run the model. Return the logits, or the hidden states if it has no LM head.

    `source` is the encoder input of an encoder-decoder, else None.
    """
    if isinstance(model, DescribedModel):
        return model.forward(tokens, source)
    return model.per_token_output(*((source, tokens) if isinstance(model, EncoderDecoder) else (tokens,)))


def sites(model: ModelLike) -> SiteMap:
    """Return all sites of a model by name, in execution order.

    For a transformers model, these are the sites that the family's weight mapping can locate. For any other module, the
    sites are the submodule paths with `.in` (the input) and `.out` (the output) appended, or the sites that
    `describe_model` was called with.
    """
    return with_attached_sites(unwrap_model(model), _model_sites(model))


def _model_sites(model: ModelLike) -> SiteMap:
    if isinstance(model, DescribedModel):
        return model.sites
    module = unwrap_model(model)
    if isinstance(module, Transformer):
        return cutaway_sites(module)
    # Imported here because this module imports all families, which most traces do not need.
    from cutaway.lens.adapters.transformers import transformers_sites

    return transformers_sites(module)
