"""A model with its sites and its structure, which the analyses need: for models of other libraries."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens.sites import SiteMap
from cutaway.model import Transformer

RunModel = Callable[[Tensor, Tensor | None], Any]
"""Receives tokens (B, T) and the encoder input of an encoder-decoder, else None. Returns the logits, or an output that
contains them."""


@dataclass(frozen=True, eq=False)
class DescribedModel:
    """A module of another library, its sites, and its structure. `trace`, `edit` and the analyses accept it as a model.

    The structure is a cutaway model on the meta device: it has the module tree and the weights that analyses read, and
    is not executed as a whole. All forward passes run the module itself.
    """

    model: nn.Module
    sites: SiteMap
    structure: Transformer
    tokenizer: Any = None
    """Tokenizer of cutaway or transformers, which analyses need for texts."""
    run_model: RunModel | None = None
    """How to call the model; None calls it with tokens as a transformers model or as `model(tokens)`."""
    is_stated: bool = False
    """Whether the user stated the sites, so that the structure has no position method and no details of the FFN."""

    def forward(self, tokens: Tensor, source: Tensor | None) -> Tensor:
        """Return the logits, or the last hidden state if the model has no head, both (B, T, …)."""
        if self.run_model is not None:
            return find_output(self.run_model(tokens, source))
        if not hasattr(self.model, "config"):
            return find_output(self.model(tokens))
        # Only eager attention returns patterns, some models only on request.
        is_eager = getattr(self.model.config, "_attn_implementation", None) == "eager"
        kwargs: dict[str, Any] = {"output_attentions": True} if is_eager else {}
        if "decoder" in self.structure.stacks:
            kwargs["use_cache"] = False
        if source is not None:
            return find_output(self.model(input_ids=source, decoder_input_ids=tokens, **kwargs))
        return find_output(self.model(input_ids=tokens, **kwargs))


def find_output(output: object) -> Tensor:
    """Return the logits or the last hidden state in the output of a model: a tensor, or the first one in it."""
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    items = output if isinstance(output, tuple | list) else [output]
    value = next((item for item in items if isinstance(item, Tensor) and item.ndim == 3), None)
    if value is None:
        problem = f"the model returned a {type(output).__name__} without logits of shape (batch, tokens, vocabulary)"
        raise InputError(f"{problem}; pass run_model=… to describe_model, a function that returns the logits")
    return value
