"""Output head: LM head with optional transform, or none."""

from typing import Annotated, Literal

from cutaway.config.ffn import Activation
from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, FiniteFloat, PositiveFloat, default_kind
from cutaway.config.norms import NoNorm, Norm


class HeadTransform(ConfigNode):
    """norm(act(dense(x))) before the output matrix (BERT's masked-LM head, OPT-350m's down-projection)."""

    activation: Activation = "gelu"
    norm: Norm = NoNorm()
    bias: bool = True


class LMHead(ConfigNode):
    """logits = softcap(scale · (x·Eᵀ + bias)); E is the token embedding if tied, else a matrix of its own."""

    kind: Literal["lm"] = "lm"
    tied: bool = True
    bias: Literal["none", "learned", "fixed"] = "none"
    """Bias on the logits. A 'fixed' bias is saved in the checkpoint but not trained (BART, Marian)."""
    scale: FiniteFloat = 1.0
    softcap: PositiveFloat | None = None
    transform: HeadTransform | None = None


class NoHead(ConfigNode):
    """No head: the model returns hidden states only."""

    kind: Literal["none"] = "none"


OutputHead = Annotated[LMHead | NoHead, KIND_DISCRIMINATOR, default_kind("lm")]
