"""The configuration of a whole model: Decoder, Encoder, EncoderDecoder, and checks across configuration nodes."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from cutaway.config.attention import LatentAttention, MultiHead, MultiHeadBase
from cutaway.config.embedding import Embedding
from cutaway.config.head import LMHead, OutputHead
from cutaway.config.init_scheme import Init, NormalInit
from cutaway.config.node import ConfigNode, PositiveInt
from cutaway.config.positions import DynamicNTK, LongRope, Rope, SinusoidalPosition
from cutaway.config.stack import Block, CrossBlock, CrossStack, Stack


class TransformerConfig(ConfigNode):
    """Configuration of a whole model: fields that decoders, encoders and encoder-decoders share."""

    vocab_size: PositiveInt
    d_model: PositiveInt
    context: PositiveInt | None = None
    """Context length that the model was trained for. It is the default sequence length of tools, not a limit."""
    head: OutputHead = LMHead()
    init: Init = NormalInit()

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name: `encoder`, `decoder` or both."""
        return {name: getattr(self, name) for name in ("encoder", "decoder") if hasattr(self, name)}

    @model_validator(mode="after")
    def _check_consistency(self) -> "TransformerConfig":
        _check_nodes(self)
        return self


class Decoder(TransformerConfig):
    """Configuration of a decoder-only model with causal attention (GPT, Llama)."""

    form: Literal["decoder"] = "decoder"
    decoder: Stack


class Encoder(TransformerConfig):
    """Configuration of an encoder-only model with bidirectional attention (BERT)."""

    form: Literal["encoder"] = "encoder"
    encoder: Stack
    pooler: bool = False
    """Add a pooler: tanh(dense(first token)), BERT's sentence vector."""


class EncoderDecoder(TransformerConfig):
    """Configuration of an encoder-decoder with cross-attention (the 2017 Transformer, T5, BART)."""

    form: Literal["encoder-decoder"] = "encoder-decoder"
    encoder: Stack
    decoder: CrossStack
    source_vocab_size: PositiveInt | None = None
    """Vocabulary size of the encoder's own token table. By default encoder and decoder share one table."""


Config = Decoder | Encoder | EncoderDecoder
CONFIG_ADAPTER: TypeAdapter[Config] = TypeAdapter(Annotated[Config, Field(discriminator="form")])


_DECODER_HEADS = ("lm", "sequence-classification", "token-classification", "embedding")
_HEAD_KINDS: dict[type[TransformerConfig], tuple[str, ...]] = {
    Decoder: _DECODER_HEADS,
    Encoder: (*_DECODER_HEADS, "multiple-choice", "none"),
    EncoderDecoder: ("lm", "sequence-classification"),
}
_PLURALS = {Decoder: "decoders", Encoder: "encoders", EncoderDecoder: "encoder-decoders"}


def _check_nodes(config: TransformerConfig) -> None:
    """Raise ValueError('key path: problem') if nodes of the configuration contradict each other."""
    d_model, head = config.d_model, config.head
    for side, stack in config.stacks.items():
        _check_sinusoidal_dim(f"{side}.embedding", stack.embedding, d_model)
        for index, block in enumerate(stack.blocks):
            path = f"{side}.{_block_path(stack, index)}"
            if isinstance(block.attention, MultiHeadBase):
                _check_heads(f"{path}.attention", block.attention, d_model)
            if isinstance(block, CrossBlock):
                _check_heads(f"{path}.cross", block.cross, d_model)
            _check_rope(f"{path}.attention", block.attention, d_model)
        if stack.layer_groups is not None and any(_has_unshared_bias(block) for block in stack.blocks):
            raise ValueError(
                f"{side}.layer_groups: shared layers need a shared relative bias; set position.shared to true"
            )
    if isinstance(head, LMHead):
        table_dim = _tied_table_dim(config)
        if head.tied and table_dim != d_model and head.transform is None:
            problem = f"a tied head needs inputs of the token table's dimension {table_dim}, not {d_model}"
            raise ValueError(f"head: {problem}; add head.transform or set head.tied to false")
    elif head.kind not in _HEAD_KINDS[type(config)]:
        kinds = " or ".join(f"'{kind}'" for kind in _HEAD_KINDS[type(config)])
        raise ValueError(f"head: kind '{head.kind}' is not for {_PLURALS[type(config)]}; use kind {kinds}")
    table_dims = {stack.embedding.token_table_dim(d_model) for stack in config.stacks.values()}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is None and len(table_dims) > 1:
        problem = "encoder and decoder share a token table, so both need this factorization; or set source_vocab_size"
        raise ValueError(f"encoder.embedding.factorization: {problem}")


def _block_path(stack: Stack, index: int) -> str:
    """Key path, within the stack, of the block of layer `index`."""
    if index < len(stack.leading_blocks):
        return f"leading_blocks[{index}]"
    return "block" if len(stack.block) == 1 else f"block[{(index - len(stack.leading_blocks)) % len(stack.block)}]"


def _has_unshared_bias(block: Block) -> bool:
    position = getattr(block.attention, "position", None)
    return getattr(position, "shared", True) is False


def _tied_table_dim(config: TransformerConfig) -> int:
    name = "decoder" if "decoder" in config.stacks else "encoder"
    return config.stacks[name].embedding.token_table_dim(config.d_model)


def _check_sinusoidal_dim(path: str, embedding: Embedding, d_model: int) -> None:
    dim = embedding.position_dim(d_model)
    if isinstance(embedding.position, SinusoidalPosition) and dim % 2:
        raise ValueError(f"{path}.position: sinusoidal positions need an even dimension, not {dim}")
    if isinstance(embedding.position, SinusoidalPosition) and embedding.position.endpoint and dim < 4:
        raise ValueError(
            f"{path}.position.endpoint: the exponents 2i/(d − 2) need a dimension of at least 4, not {dim}"
        )


def _check_heads(path: str, attention: MultiHeadBase, d_model: int) -> None:
    if attention.d_head is None and d_model % attention.heads:
        problem = f"{attention.heads} heads do not divide d_model {d_model}; change one of them or set d_head"
        raise ValueError(f"{path}.heads: {problem}")


def _check_rope(path: str, attention: MultiHead | LatentAttention, d_model: int) -> None:
    rope = attention.position
    if not isinstance(rope, Rope):
        return
    head = attention.max_rotary_dim(d_model)
    width = rope.rotary_dim or head
    if width > head:
        raise ValueError(f"{path}.position.rotary_dim: {width} is more than the head's {head} dimensions")
    if width % 2:
        problem = f"RoPE rotates pairs of dimensions, but a head has {width}; set an even d_head or position.rotary_dim"
        raise ValueError(f"{path}.position: {problem}")
    if isinstance(rope.scaling, DynamicNTK) and width < 4:
        problem = f"dynamic NTK divides by rotary_dim − 2, so it needs at least 4 dimensions, not {width}"
        raise ValueError(f"{path}.position.scaling: {problem}")
    if isinstance(rope.scaling, LongRope) and len(rope.scaling.short_factors) != width // 2:
        raise ValueError(
            f"{path}.position.scaling: LongRoPE needs {width // 2} factors, one per pair of the {width} rotated"
            f" dimensions, not {len(rope.scaling.short_factors)}"
        )
