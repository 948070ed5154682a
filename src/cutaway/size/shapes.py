"""A model made deeper or wider, with everything else about it kept: its family of shapes, and which of them fit."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import TypeVar

from cutaway.config.attention import Attention, Heads, Latent, MultiHead
from cutaway.config.embedding import Embedding, Head
from cutaway.config.ffn import FFN, DenseFFN, Gated, Mlp, Moe
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import Learned, NoPosition
from cutaway.config.stack import Block, CrossBlock, Stack
from cutaway.config.transformer import Config, Decoder
from cutaway.errors import InputError
from cutaway.size.parallel import tensor_share
from cutaway.size.params import count
from cutaway.size.question import Question
from cutaway.size.sizing import Size

LAYERS = (2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
WIDTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
THINNEST, THICKEST = 24, 192
"""Width over layers, between which nearly all published models lie."""
WHOLE = 128
"""Scaled widths stay multiples of what the source's is a multiple of, up to this."""

FAMILIES = ("classic", "llama")
"""Kinds of model that have shapes without being one model."""

SMALLEST, LARGEST = 1 / 8, 2
"""Shares of the budget between which a shape is worth listing."""
TABLE = 8
"""Layers, and widths, that a table of shapes has at most."""

H = TypeVar("H", bound=Heads)


@dataclass(frozen=True)
class Shape:
    """One member of a family."""

    layers: int
    """Of the decoder, in an encoder-decoder."""
    width: int
    heads: int
    parameters: int
    total: int
    """Bytes on one device, for the batch and context that were asked for."""
    fits: bool


def family(name: str, context: int | None = None) -> Config:
    """A family's member of 32 layers and width 4,096. Learned positions reach as far as `context` asks."""
    if name == "classic":
        length = max(context or 0, 2048)
        attention = MultiHead(heads=32, bias=("q", "k", "v", "o"), position=NoPosition())
        stack = Stack(
            layers=32,
            block=(Block(attention=attention, ffn=Mlp()),),
            embedding=Embedding(position=Learned(length=length)),
            norm=LayerNorm(),
        )
        return Decoder(vocab_size=50_000, d_model=4096, context=length, decoder=stack)
    assert name == "llama"
    grouped = Block(attention=MultiHead(heads=32, kv_heads=8), ffn=Gated(hidden=14_336))
    stack = Stack(layers=32, block=(grouped,))
    return Decoder(vocab_size=128_256, d_model=4096, context=8192, head=Head(tied=False), decoder=stack)


def main_stack(config: Config) -> Stack:
    """The decoder where there is one: its layers and heads stand for the model's."""
    return config.stacks["decoder" if "decoder" in config.stacks else "encoder"]


def layers_of(config: Config) -> int:
    return main_stack(config).layers


def heads_of(config: Config) -> int:
    """Query heads of the repeated block; of its widest, where they differ."""
    return max(block.attention.heads for block in main_stack(config).block)


def head_width(config: Config) -> int:
    """The widest head's."""
    return max(_width_of(block.attention, config.d_model) for stack in config.stacks.values() for block in stack.blocks)


def fewest_layers(config: Config) -> int:
    """Enough for the lead and one whole pattern in every stack."""
    own = layers_of(config)
    least = 1
    for stack in config.stacks.values():
        need = len(stack.lead) + len(stack.block)
        least = max(least, -(-need * own // stack.layers))
    return min(least, own)


def scaled(config: Config, layers: int, width: int) -> Config:
    """The same kind of model with so many layers and this width; at the source's own, the source itself.

    Kept are the width of a head, the ratio of FFN and latents to the stream, how many queries share a key, lead and
    pattern, windows, experts, positions and vocabulary. The two stacks of an encoder-decoder keep their ratio.
    """
    own = layers_of(config)
    stacks: dict[str, Stack] = {}
    for name, stack in config.stacks.items():
        deep = max(1, _round(stack.layers * layers, own))
        stacks[name] = stack.replace(
            layers=deep,
            block=tuple(_block(block, config.d_model, width) for block in stack.block),
            lead=tuple(_block(block, config.d_model, width) for block in stack.lead),
            groups=None if stack.groups is None else min(stack.groups, deep),
        )
    return config.replace(d_model=width, **stacks)


def _block(block: Block, d_model: int, width: int) -> Block:
    changes: dict[str, object] = {"ffn": _ffn(block.ffn, d_model, width)}
    if isinstance(block, CrossBlock):
        changes["cross"] = _heads(block.cross, d_model, width)
    return block.replace(attention=_attention(block.attention, d_model, width), **changes)


def _attention(attention: Attention, d_model: int, width: int) -> Attention:
    if isinstance(attention, Latent):
        q_rank = None if attention.q_rank is None else _ratio(attention.q_rank, d_model, width)
        heads = max(1, _round(attention.heads * width, d_model))
        return attention.replace(heads=heads, q_rank=q_rank, kv_rank=_ratio(attention.kv_rank, d_model, width))
    return _heads(attention, d_model, width)


def _heads(attention: H, d_model: int, width: int) -> H:
    heads, d_head = max(1, _round(attention.heads * width, d_model)), attention.head_width(d_model)
    implied = attention.d_head is None and heads * d_head == width
    return attention.replace(heads=heads, kv_heads=_kv_heads(attention, heads), d_head=None if implied else d_head)


def _kv_heads(attention: Heads, heads: int) -> int | None:
    """As many queries to a key as before, or as nearly as divides them; one key for all stays one for all."""
    before = attention.kv_heads
    if before is None or before == 1:
        return before
    divisors = (count for count in range(1, heads + 1) if heads % count == 0)

    def off(count: int) -> float:
        share = count * attention.heads / (heads * before)
        return max(share, 1 / share)

    return min(divisors, key=off)


def _ffn(ffn: FFN, d_model: int, width: int) -> FFN:
    if not isinstance(ffn, Moe):
        return _dense(ffn, d_model, width)
    shared = None if ffn.shared is None else _dense(ffn.shared, d_model, width)
    return ffn.replace(expert=_dense(ffn.expert, d_model, width), shared=shared)


def _dense(ffn: DenseFFN, d_model: int, width: int) -> DenseFFN:
    """A width that follows from d_model goes on doing so."""
    return ffn if ffn.hidden is None else ffn.replace(hidden=_ratio(ffn.hidden, d_model, width))


def _ratio(size: int, d_model: int, width: int) -> int:
    unit = gcd(size, WHOLE)
    return max(1, _round(size // unit * width, d_model)) * unit


def _round(above: int, below: int) -> int:
    """above / below to the nearest whole number, in whole numbers."""
    return (2 * above + below) // (2 * below)


def _width_of(attention: Attention, d_model: int) -> int:
    return attention.d_nope + attention.d_rope if isinstance(attention, Latent) else attention.head_width(d_model)


# ---------------------------------------------------------------------------------------- which of them fit


def shapes_around(asked: Question, budget: int) -> tuple[tuple[Shape, ...], str]:
    """Shapes from an eighth of the budget to the first beyond it at each width, and what to know about them."""
    source, notes = asked.config, []
    total = cache(lambda config: Size(replace(asked, config=config)).memory.total)
    columns = [usual_depths(source, width) for width in ladder(WIDTHS, source.d_model)]
    whole = [[each for each in column if splits(each, asked)] for column in columns]
    if whole != columns:
        notes.append(f"Shapes whose heads or hidden units {asked.gpus} devices cannot share are left out.")
    around = [each for column in whole for each in worth_measuring(column, asked, budget, total)]
    around = at_most(TABLE, around, (layers_of(source), source.d_model))
    if not around and (every := [each for column in whole for each in column]):
        smallest = min(every, key=lambda config: count(config).total)
        if total(smallest) > budget:
            around = [smallest]
            notes.append("Not even the smallest shape fits.")
        else:
            around = [column[-1] for column in whole if column][-TABLE:]
            notes.append("Every shape fits many times over; the largest are listed.")
    encoder, layers = source.stacks.get("encoder"), layers_of(source)
    if encoder is not None and encoder.layers != layers:
        notes.append(f"Layers are the decoder's; the encoder has {encoder.layers} for every {layers} of them.")
    listed = [
        Shape(layers_of(each), each.d_model, heads_of(each), count(each).total, total(each), total(each) <= budget)
        for each in around
    ]
    return tuple(sorted(listed, key=lambda shape: (shape.layers, shape.width))), " ".join(notes)


def ladder(usual: tuple[int, ...], own: int) -> list[int]:
    """The usual values with the source's own, which stands for those within a tenth of it."""
    return sorted({own, *(value for value in usual if abs(value - own) > own / 10)})


def usual_depths(source: Config, width: int) -> list[Config]:
    """A width's shapes by depth, as far as they are usual; the source's own is always among them."""
    own, least = layers_of(source), fewest_layers(source)
    if width < head_width(source) and width != source.d_model:
        return []
    depths = [
        layers
        for layers in ladder(LAYERS, own)
        if (layers >= least and THINNEST * layers <= width <= THICKEST * layers)
        or (layers, width) == (own, source.d_model)
    ]
    return [scaled(source, layers, width) for layers in depths]


def splits(config: Config, asked: Question) -> bool:
    """Whether the devices can share it."""
    try:
        tensor_share(config, asked.devices.tensor)
    except InputError:
        return False
    return True


def least_bytes(config: Config, asked: Question) -> int:
    """What its weights take at least, without a walk over its layers."""
    return count(config).total * asked.dtype.bits // 8 // asked.gpus


def worth_measuring(column: list[Config], asked: Question, budget: int, total: Callable[[Config], int]) -> list[Config]:
    """Those of a width, from shallow to deep, that are near the budget.

    Deep ones are costly to walk and each layer adds about as much as the last, so a line through the two shallowest
    tells which are worth it; their totals are then exact.
    """
    light = [each for each in column if least_bytes(each, asked) <= LARGEST * budget]
    if len(light) < 2:
        return [each for each in light if SMALLEST * budget <= total(each) <= LARGEST * budget]
    (low, start), (high, end) = ((layers_of(each), total(each)) for each in light[:2])
    near = [start + (end - start) * (layers_of(each) - low) / (high - low) for each in light]
    first, beyond = bisect_left(near, SMALLEST * budget), bisect_right(near, budget)
    return [each for each, about in zip(light, near, strict=True) if about <= LARGEST * budget][first : beyond + 1]


def at_most(many: int, configs: list[Config], own: tuple[int, int]) -> list[Config]:
    """A table of at most so many widths and depths: those with the most shapes, and the source's own."""
    for kind, mine in ((lambda config: config.d_model, own[1]), (layers_of, own[0])):
        counted = Counter(kind(each) for each in configs)
        kept = set(sorted(counted, key=lambda value: (value == mine, counted[value], value))[-many:])
        configs = [each for each in configs if kind(each) in kept]
    return configs
