"""What may be looked into, whatever it comes wrapped in, and how it is called with a text."""

from typing import Any

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.model import EncoderDecoder, EncoderOnly, Transformer


def unwrapped(model: Any) -> nn.Module:
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


def ours(model: Any) -> Transformer:
    """The same, for what only a model of cutaway's can be asked."""
    inner = unwrapped(model)
    if not isinstance(inner, Transformer):
        raise InputError(f"a {type(inner).__name__} is no cutaway model; give one of ct.build(…) or ct.load(…)")
    return inner


def run(model: Transformer, tokens: Tensor, source: Tensor | None) -> Tensor:
    """Logits, or the encoder's vectors where there is no head."""
    if isinstance(model, EncoderDecoder):
        return model(source, tokens)
    if isinstance(model, EncoderOnly) and model.head is None:
        return model.encode(tokens)
    return model(tokens)
