"""A stack: embedding, blocks from a repeated pattern, norm placement, final norm."""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from cutaway.config.attention import Attention, Cross, LatentAttention, MultiHeadBase
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import FFN, DenseFFN, Gated, Moe
from cutaway.config.node import KIND_DISCRIMINATOR, ConfigNode, PositiveFloat, PositiveInt, Probability
from cutaway.config.norms import Norm, RMSNorm


class PreNorm(ConfigNode):
    """Norm before each sublayer F (attention or FFN): x + F(norm(x)). https://arxiv.org/abs/2002.04745"""

    kind: Literal["pre"] = "pre"
    final_norm: bool = True
    skip_first_prenorm: bool = False
    """Leave out the norm before the first attention (ModernBERT)."""
    norm_skip: bool = False
    """The skip connection starts after the norm: norm(x) + F(norm(x)) (an option of BLOOM)."""


class PostNorm(ConfigNode):
    """Norm after each addition: norm(x·skip_scale + F(x)) (2017 Transformer, BERT; DeepNorm with skip_scale). https://arxiv.org/abs/2203.00555"""

    kind: Literal["post"] = "post"
    final_norm: bool = False
    skip_scale: PositiveFloat = 1.0


class SandwichNorm(ConfigNode):
    """Norms before and after each sublayer F: x + norm2(F(norm1(x))) (Gemma 2)."""

    kind: Literal["sandwich"] = "sandwich"
    final_norm: bool = True


class OutputNorm(ConfigNode):
    """Norm on the output of each sublayer F: x + norm(F(x)) (OLMo 2)."""

    kind: Literal["output"] = "output"
    final_norm: bool = True


class ParallelResidual(ConfigNode):
    """Attention and FFN of the same input: x + attention(norm(x)) + FFN(norm(x)) (GPT-J)."""

    kind: Literal["parallel"] = "parallel"
    final_norm: bool = True
    norms: Literal["one", "two"] = "one"
    """'one': attention and FFN have the same norm (GPT-J). 'two': each has its own norm (GPT-NeoX)."""


Placement = Annotated[PreNorm | PostNorm | SandwichNorm | OutputNorm | ParallelResidual, KIND_DISCRIMINATOR]


class Block(ConfigNode):
    """A block: attention and FFN."""

    attention: Attention
    ffn: FFN = Gated()


class CrossBlock(Block):
    """A decoder block with cross-attention."""

    cross: Cross


def _as_tuple(data: object) -> object:
    return data if isinstance(data, list | tuple) else (data,)


class Stack(ConfigNode):
    """A stack of `layers` layers: `leading_blocks`, then the pattern `block` (one or several blocks), repeated."""

    layers: Annotated[int, Field(strict=True, ge=1, le=10_000)]
    block: Annotated[
        tuple[Block, ...],
        BeforeValidator(_as_tuple, json_schema_input_type=Block | tuple[Block, ...]),
        Field(min_length=1),
    ]
    leading_blocks: tuple[Block, ...] = ()
    embedding: Embedding = Embedding()
    norm: Norm = RMSNorm()
    placement: Placement = PreNorm()
    residual_scale: PositiveFloat = 1.0
    """Factor on every sublayer's output (Granite)."""
    dropout: Probability = 0.0
    """Dropout on every sublayer's output."""
    attention_resid_dropout: Probability | None = None
    """Dropout on the attention output; default `dropout` (DistilBERT: 0)."""
    final_dropout: Probability = 0.0
    """Dropout after the final norm (T5)."""
    layer_groups: PositiveInt | None = None
    """Cross-layer weight sharing: layer i uses weight set ⌊i·layer_groups/layers⌋ (ALBERT: 1)."""
    layers_per_group: PositiveInt = 1
    """With layer_groups: number of consecutive layers, each with its own weights, that a group repeats together."""

    @model_validator(mode="after")
    def _check_layer_pattern(self) -> "Stack":
        if len(self.leading_blocks) > self.layers:
            raise ValueError(
                f"leading_blocks has {len(self.leading_blocks)} blocks, but layers is only {self.layers}; add layers"
            )
        if len(self.leading_blocks) + len(self.block) > self.layers and len(self.block) > 1:
            raise ValueError(
                f"layers is {self.layers}, but {len(self.leading_blocks)} leading blocks and a pattern of"
                f" {len(self.block)} blocks need more layers; shorten the pattern or add layers"
            )
        if self.layer_groups is None:
            if self.layers_per_group > 1:
                raise ValueError("layers_per_group needs layer_groups, the number of groups; set it, or leave both out")
        else:
            if self.layers % self.layers_per_group:
                raise ValueError(f"layers_per_group {self.layers_per_group} does not divide the {self.layers} layers")
            repeats = self.layers // self.layers_per_group
            if self.layer_groups > repeats:
                each = "" if self.layers_per_group == 1 else f" in groups of {self.layers_per_group}"
                raise ValueError(f"layer_groups {self.layer_groups} is more than the {self.layers} layers{each}")
            if len(set(self.blocks)) > 1:
                raise ValueError(
                    "layer_groups shares weights, so all layers must be equal; use one block and no leading_blocks"
                )
            if isinstance(self.placement, PreNorm) and self.placement.skip_first_prenorm:
                raise ValueError(
                    "layer_groups shares weights, so the first layer cannot differ; set skip_first_prenorm to false"
                )
        return self

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block configuration of each layer."""
        rest = self.layers - len(self.leading_blocks)
        return self.leading_blocks + (self.block * -(-rest // len(self.block)))[:rest]

    @property
    def weight_sets(self) -> tuple[int, ...]:
        """Index of the weight set of each layer. Layers with equal indices share their weights."""
        if self.layer_groups is None:
            return tuple(range(self.layers))
        size, groups = self.layers_per_group, self.layer_groups
        repeats = self.layers // size
        return tuple(i // size * groups // repeats * size + i % size for i in range(self.layers))

    def edit_layers(
        self,
        attention: Callable[[MultiHeadBase | LatentAttention], MultiHeadBase | LatentAttention] = lambda node: node,
        ffn: Callable[[DenseFFN], DenseFFN] = lambda node: node,
    ) -> Self:
        """Return a copy with `attention` applied to each self-attention and cross-attention, and `ffn` to each FFN.

        In a mixture of experts, `ffn` is applied to `expert` and `shared`.
        """

        def edit_block(block: Block) -> Block:
            changes: dict[str, object] = {"attention": attention(block.attention)}
            if isinstance(block, CrossBlock):
                changes["cross"] = attention(block.cross)
            if isinstance(block.ffn, Moe):
                shared = None if block.ffn.shared is None else ffn(block.ffn.shared)
                return block.replace(ffn=block.ffn.replace(expert=ffn(block.ffn.expert), shared=shared), **changes)
            return block.replace(ffn=ffn(block.ffn), **changes)

        blocks, leading_blocks = (tuple(map(edit_block, blocks)) for blocks in (self.block, self.leading_blocks))
        return self.replace(block=blocks, leading_blocks=leading_blocks)


class CrossStack(Stack):
    """The decoder of an encoder-decoder."""

    block: Annotated[
        tuple[CrossBlock, ...],
        BeforeValidator(_as_tuple, json_schema_input_type=CrossBlock | tuple[CrossBlock, ...]),
        Field(min_length=1),
    ]
    leading_blocks: tuple[CrossBlock, ...] = ()

    @model_validator(mode="after")
    def _check_placement(self) -> "CrossStack":
        if isinstance(self.placement, ParallelResidual):
            raise ValueError("placement 'parallel' does not support cross-attention; use pre, post, sandwich or output")
        return self
