"""A stack: embedding, blocks tiled from a pattern, final norm."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from cutaway.config.attention import Attention, Cross
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import FFN, Gated
from cutaway.config.norms import Norm, RMSNorm
from cutaway.config.part import TAGGED, Count, Part, Positive, Rate


class Pre(Part):
    """x + F(norm(x)). https://arxiv.org/abs/2002.04745"""

    kind: Literal["pre"] = "pre"
    final_norm: bool = True
    bare_start: bool = False
    """The first attention reads the embedding without a norm of its own (ModernBERT)."""


class Post(Part):
    """norm(x·stream_scale + F(x)): the 2017 Transformer, BERT; DeepNorm with a scale. https://arxiv.org/abs/2203.00555"""

    kind: Literal["post"] = "post"
    final_norm: bool = False
    stream_scale: Positive = 1.0


class Sandwich(Part):
    """x + norm(F(norm(x))) (Gemma 2)."""

    kind: Literal["sandwich"] = "sandwich"
    final_norm: bool = True


class Output(Part):
    """x + norm(F(x)) (OLMo 2)."""

    kind: Literal["output"] = "output"
    final_norm: bool = True


class Parallel(Part):
    """x + attention(norm(x)) + FFN(norm(x)) (GPT-J)."""

    kind: Literal["parallel"] = "parallel"
    final_norm: bool = True
    norms: Literal["one", "two"] = "one"
    """Both sublayers read the same normed stream, or each has its own norm (GPT-NeoX)."""


Placement = Annotated[Pre | Post | Sandwich | Output | Parallel, TAGGED]


class Block(Part):
    """Attention moves information between tokens, the FFN works on each."""

    attention: Attention
    ffn: FFN = Gated()


class CrossBlock(Block):
    """A decoder's block that also reads the encoder."""

    cross: Cross


def _as_tuple(data: object) -> object:
    return data if isinstance(data, list | tuple) else (data,)


class Stack(Part):
    """A tower of blocks. `lead` comes first, then `block` (one, or a pattern of several) tiled up to `layers`."""

    layers: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    block: Annotated[
        tuple[Block, ...],
        BeforeValidator(_as_tuple, json_schema_input_type=Block | tuple[Block, ...]),
        Field(min_length=1),
    ]
    lead: tuple[Block, ...] = ()
    embedding: Embedding = Embedding()
    norm: Norm = RMSNorm()
    placement: Placement = Pre()
    residual_scale: Positive = 1.0
    """Multiplies what every sublayer adds (Granite)."""
    dropout: Rate = 0.0
    """On what every sublayer adds."""
    attention_dropout: Rate | None = None
    """On what attention adds, where it is another (DistilBERT: none)."""
    final_dropout: Rate = 0.0
    """After the final norm (T5)."""
    groups: Count | None = None
    """How many sets of weights the layers share; layer i uses set ⌊i·groups/layers⌋ (ALBERT: 1)."""

    @model_validator(mode="after")
    def _tiles(self) -> "Stack":
        if len(self.lead) > self.layers:
            raise ValueError(f"lead has {len(self.lead)} blocks but layers is {self.layers}")
        if len(self.lead) + len(self.block) > self.layers and len(self.block) > 1:
            raise ValueError(
                f"layers {self.layers} is fewer than the {len(self.lead)} lead blocks and the pattern of"
                f" {len(self.block)}; shorten the pattern or add layers"
            )
        if self.groups is not None:
            if self.groups > self.layers:
                raise ValueError(f"groups {self.groups} is more than the {self.layers} layers")
            if len(set(self.blocks)) > 1:
                raise ValueError("groups shares weights between layers, so all layers must be alike; give one block")
            if isinstance(self.placement, Pre) and self.placement.bare_start:
                raise ValueError(
                    "groups shares weights between layers, so the first cannot differ; set bare_start to false"
                )
        return self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """One block configuration a layer."""
        rest = self.layers - len(self.lead)
        return self.lead + (self.block * -(-rest // len(self.block)))[:rest]


class CrossStack(Stack):
    """The decoder of an encoder-decoder."""

    block: Annotated[
        tuple[CrossBlock, ...],
        BeforeValidator(_as_tuple, json_schema_input_type=CrossBlock | tuple[CrossBlock, ...]),
        Field(min_length=1),
    ]
    lead: tuple[CrossBlock, ...] = ()

    @model_validator(mode="after")
    def _in_turn(self) -> "CrossStack":
        if isinstance(self.placement, Parallel):
            raise ValueError("placement 'parallel' has no place for cross-attention; use pre, post, sandwich or output")
        return self
