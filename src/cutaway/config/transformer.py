"""The three forms of Transformer, and the rules that hold between their parts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, model_validator

from cutaway.config.attention import Heads, Latent, MultiHead
from cutaway.config.embedding import AnyHead, Embedding, Head
from cutaway.config.initialisation import Init, Normal
from cutaway.config.part import Count, Part
from cutaway.config.positions import DynamicNTK, LongRope, Rope, Sinusoidal
from cutaway.config.stack import Block, CrossBlock, CrossStack, Stack


class Form(Part):
    """What every Transformer has."""

    vocab_size: Count
    d_model: Count
    context: Count | None = None
    """The longest sequence it is meant for: a default for tools, not a limit (learned positions are one)."""
    head: AnyHead = Head()
    init: Init = Normal()

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks by name: `encoder`, `decoder` or both."""
        return {name: getattr(self, name) for name in ("encoder", "decoder") if hasattr(self, name)}

    @model_validator(mode="after")
    def _parts_fit(self) -> "Form":
        for path, problem in _misfits(self):
            raise ValueError(f"{path}: {problem}")
        return self


class Decoder(Form):
    """Decoder-only: each token sees itself and what came before (GPT, Llama)."""

    form: Literal["decoder"] = "decoder"
    decoder: Stack


class Encoder(Form):
    """Encoder-only: every token sees every token (BERT)."""

    form: Literal["encoder"] = "encoder"
    encoder: Stack
    pooler: bool = False
    """tanh(dense(first token)), BERT's sentence vector."""


class EncoderDecoder(Form):
    """A bidirectional source, a causal target that reads it (the 2017 Transformer, T5, BART)."""

    form: Literal["encoder-decoder"] = "encoder-decoder"
    encoder: Stack
    decoder: CrossStack
    source_vocab_size: Count | None = None
    """Tokens the encoder knows, where it has a table of its own; otherwise both sides share one table."""


Config = Decoder | Encoder | EncoderDecoder
ADAPTER: TypeAdapter[Config] = TypeAdapter(Annotated[Config, Field(discriminator="form")])


def _misfits(config: Form) -> Iterator[tuple[str, str]]:
    """Every rule that one part alone cannot check, as (path, what is wrong and what would be right)."""
    d_model = config.d_model
    for side, stack in config.stacks.items():
        yield from _embedding_misfits(f"{side}.embedding", stack.embedding, d_model)
        for index, block in enumerate(stack.blocks):
            path = f"{side}.{_written_at(stack, index)}"
            attention = block.attention
            if isinstance(attention, Heads):
                yield from _heads_misfits(f"{path}.attention", attention, d_model)
            if isinstance(block, CrossBlock):
                yield from _heads_misfits(f"{path}.cross", block.cross, d_model)
            yield from _rope_misfits(f"{path}.attention", attention, d_model)
        if stack.groups is not None and any(_has_own_bias(block) for block in stack.blocks):
            yield f"{side}.groups", "shared layers need a shared relative bias; set position.shared to true"
    head = config.head
    if isinstance(head, Head):
        narrow = _tied_width(config) != d_model
        if head.tied and narrow and head.transform is None:
            yield (
                "head",
                (
                    f"a tied head reads vectors of the token table's width {_tied_width(config)}, not {d_model};"
                    " add head.transform or set head.tied to false"
                ),
            )
    elif not isinstance(config, Encoder):
        yield "head", "kind 'none' is for encoders; a decoder needs logits, so use kind 'lm'"
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is None:
        tables = {stack.embedding.table_width(d_model) for stack in config.stacks.values()}
        if len(tables) > 1:
            yield (
                "encoder.embedding.factor",
                "both sides share one token table, so both need the same factor; or give source_vocab_size",
            )


def _written_at(stack: Stack, index: int) -> str:
    """Where in the configuration the block of layer `index` stands."""
    if index < len(stack.lead):
        return f"lead[{index}]"
    return "block" if len(stack.block) == 1 else f"block[{(index - len(stack.lead)) % len(stack.block)}]"


def _has_own_bias(block: Block) -> bool:
    position = getattr(block.attention, "position", None)
    return getattr(position, "shared", True) is False


def _tied_width(config: Form) -> int:
    name = "decoder" if "decoder" in config.stacks else "encoder"
    return config.stacks[name].embedding.table_width(config.d_model)


def _embedding_misfits(path: str, embedding: Embedding, d_model: int) -> Iterator[tuple[str, str]]:
    if isinstance(embedding.position, Sinusoidal) and embedding.sum_width(d_model) % 2:
        yield f"{path}.position", f"sinusoidal positions need an even width, not {embedding.sum_width(d_model)}"


def _heads_misfits(path: str, attention: Heads, d_model: int) -> Iterator[tuple[str, str]]:
    if attention.d_head is None and d_model % attention.heads:
        yield (
            f"{path}.heads",
            f"{attention.heads} heads do not divide d_model {d_model}; change one of them or give d_head",
        )


def _rope_misfits(path: str, attention: MultiHead | Latent, d_model: int) -> Iterator[tuple[str, str]]:
    rope = attention.position
    if not isinstance(rope, Rope):
        return
    head = attention.d_rope if isinstance(attention, Latent) else attention.head_width(d_model)
    width = rope.width or head
    if width > head:
        yield f"{path}.position.width", f"{width} is more than the head's {head} dimensions"
    if width % 2:
        yield (
            f"{path}.position",
            f"RoPE turns pairs of dimensions, but a head has {width}; give an even d_head or position.width",
        )
    if isinstance(rope.scaling, DynamicNTK) and width < 4:
        yield (
            f"{path}.position.scaling",
            f"dynamic NTK divides by width − 2, so it needs at least 4 dimensions, not {width}",
        )
    if isinstance(rope.scaling, LongRope) and len(rope.scaling.short_factors) != width // 2:
        yield (
            f"{path}.position.scaling",
            (
                f"LongRoPE needs {width // 2} factors, one a pair of the {width} rotated dimensions,"
                f" not {len(rope.scaling.short_factors)}"
            ),
        )
