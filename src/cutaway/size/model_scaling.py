"""A model made deeper or wider, with everything else about it kept: its family of shapes, and which of them fit."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import TypeVar

from cutaway.config.attention import Attention, LatentAttention, MultiHead, MultiHeadBase
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import FFN, DenseFFN, Gated, Mlp, Moe
from cutaway.config.head import LMHead
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import LearnedPosition, NoPosition
from cutaway.config.stack import Block, CrossBlock, Stack
from cutaway.config.transformer import Config, Decoder
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate
from cutaway.size.options import SizeOptions
from cutaway.size.parallel import shard_config
from cutaway.size.parameters import count_parameters

LAYER_CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
WIDTH_CANDIDATES = (128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
MIN_ASPECT_RATIO, MAX_ASPECT_RATIO = 24, 192
"""Width over layers, between which nearly all published models lie."""
MAX_WIDTH_MULTIPLE = 128
"""Scaled widths stay multiples of what the source's is a multiple of, up to this."""

SCALING_FAMILIES = ("classic", "llama")
"""Kinds of model that have shapes without being one model."""

MIN_BUDGET_FRACTION, MAX_BUDGET_FRACTION = 1 / 8, 2
"""Shares of the budget between which a shape is worth listing."""
MAX_TABLE_SIZE = 8
"""Layers, and widths, that a table of shapes has at most."""

H = TypeVar("H", bound=MultiHeadBase)


@dataclass(frozen=True)
class ModelShape:
    """One member of a family."""

    layers: int
    """Of the decoder, in an encoder-decoder."""
    d_model: int
    heads: int
    num_parameters: int
    total_bytes: int
    """Bytes on one device, for the batch and context that were asked for."""
    fits: bool


def build_family_config(name: str, context: int | None = None) -> Config:
    """A family's member of 32 layers and width 4,096. Learned positions reach as far as `context` asks."""
    if name == "classic":
        length = max(context or 0, 2048)
        attention = MultiHead(heads=32, bias=("q", "k", "v", "o"), position=NoPosition())
        stack = Stack(
            layers=32,
            block=(Block(attention=attention, ffn=Mlp()),),
            embedding=Embedding(position=LearnedPosition(length=length)),
            norm=LayerNorm(),
        )
        return Decoder(vocab_size=50_000, d_model=4096, context=length, decoder=stack)
    assert name == "llama"
    grouped = Block(attention=MultiHead(heads=32, kv_heads=8), ffn=Gated(hidden=14_336))
    stack = Stack(layers=32, block=(grouped,))
    return Decoder(vocab_size=128_256, d_model=4096, context=8192, head=LMHead(tied=False), decoder=stack)


def _main_stack(config: Config) -> Stack:
    """The decoder where there is one: its layers and heads stand for the model's."""
    return config.stacks["decoder" if "decoder" in config.stacks else "encoder"]


def num_layers(config: Config) -> int:
    return _main_stack(config).layers


def num_heads(config: Config) -> int:
    """Query heads of the repeated block; of its widest, where they differ."""
    return max(block.attention.heads for block in _main_stack(config).block)


def max_head_dim(config: Config) -> int:
    """The widest head's."""
    return max(_head_dim(block.attention, config.d_model) for stack in config.stacks.values() for block in stack.blocks)


def min_layers(config: Config) -> int:
    """Enough for the leading blocks and one whole pattern in every stack."""
    own = num_layers(config)
    least = 1
    for stack in config.stacks.values():
        need = len(stack.leading_blocks) + len(stack.block)
        least = max(least, -(-need * own // stack.layers))
    return min(least, own)


def scale_config(config: Config, layers: int, d_model: int) -> Config:
    """The same kind of model with so many layers and this width; at the source's own, the source itself.

    Kept are the width of a head, the ratio of FFN and latents to the stream, how many queries share a key, lead and
    pattern, windows, experts, positions and vocabulary. The two stacks of an encoder-decoder keep their ratio.
    """
    own = num_layers(config)
    stacks: dict[str, Stack] = {}
    for name, stack in config.stacks.items():
        deep = max(1, _round_divide(stack.layers * layers, own))
        stacks[name] = stack.replace(
            layers=deep,
            block=tuple(_scale_block(block, config.d_model, d_model) for block in stack.block),
            leading_blocks=tuple(_scale_block(block, config.d_model, d_model) for block in stack.leading_blocks),
            layer_groups=None if stack.layer_groups is None else min(stack.layer_groups, deep),
        )
    return config.replace(d_model=d_model, **stacks)


def _scale_block(block: Block, d_model: int, new_d_model: int) -> Block:
    changes: dict[str, object] = {"ffn": _scale_ffn(block.ffn, d_model, new_d_model)}
    if isinstance(block, CrossBlock):
        changes["cross"] = _scale_heads(block.cross, d_model, new_d_model)
    return block.replace(attention=_scale_attention(block.attention, d_model, new_d_model), **changes)


def _scale_attention(attention: Attention, d_model: int, new_d_model: int) -> Attention:
    if isinstance(attention, LatentAttention):
        q_rank = None if attention.q_rank is None else _scale_width(attention.q_rank, d_model, new_d_model)
        heads = max(1, _round_divide(attention.heads * new_d_model, d_model))
        return attention.replace(
            heads=heads, q_rank=q_rank, kv_rank=_scale_width(attention.kv_rank, d_model, new_d_model)
        )
    return _scale_heads(attention, d_model, new_d_model)


def _scale_heads(attention: H, d_model: int, new_d_model: int) -> H:
    heads, d_head = max(1, _round_divide(attention.heads * new_d_model, d_model)), attention.head_dim(d_model)
    implied = attention.d_head is None and heads * d_head == new_d_model
    return attention.replace(
        heads=heads, kv_heads=_scale_kv_heads(attention, heads), d_head=None if implied else d_head
    )


def _scale_kv_heads(attention: MultiHeadBase, new_heads: int) -> int | None:
    """As many queries to a key as before, or as nearly as divides them; one key for all stays one for all."""
    before = attention.kv_heads
    if before is None or before == 1:
        return before
    divisors = (count for count in range(1, new_heads + 1) if new_heads % count == 0)

    def off(count: int) -> float:
        share = count * attention.heads / (new_heads * before)
        return max(share, 1 / share)

    return min(divisors, key=off)


def _scale_ffn(ffn: FFN, d_model: int, new_d_model: int) -> FFN:
    if not isinstance(ffn, Moe):
        return _scale_dense_ffn(ffn, d_model, new_d_model)
    shared = None if ffn.shared is None else _scale_dense_ffn(ffn.shared, d_model, new_d_model)
    return ffn.replace(expert=_scale_dense_ffn(ffn.expert, d_model, new_d_model), shared=shared)


def _scale_dense_ffn(ffn: DenseFFN, d_model: int, new_d_model: int) -> DenseFFN:
    """A width that follows from d_model goes on doing so."""
    return ffn if ffn.hidden is None else ffn.replace(hidden=_scale_width(ffn.hidden, d_model, new_d_model))


def _scale_width(hidden_width: int, d_model: int, new_d_model: int) -> int:
    unit = gcd(hidden_width, MAX_WIDTH_MULTIPLE)
    return max(1, _round_divide(hidden_width // unit * new_d_model, d_model)) * unit


def _round_divide(numerator: int, denominator: int) -> int:
    """numerator / denominator to the nearest whole number, in whole numbers."""
    return (2 * numerator + denominator) // (2 * denominator)


def _head_dim(attention: Attention, d_model: int) -> int:
    return (
        attention.d_nope + attention.d_rope if isinstance(attention, LatentAttention) else attention.head_dim(d_model)
    )


# ---------------------------------------------------------------------------------------- which of them fit


def list_shapes_near_budget(options: SizeOptions, memory_budget: int) -> tuple[tuple[ModelShape, ...], str]:
    """Shapes from an eighth of the budget to the first beyond it at each width, and what to know about them."""
    source, notes = options.config, []
    total = cache(lambda config: SizeEstimate(replace(options, config=config)).memory.total_bytes)
    columns = [_configs_at_width(source, width) for width in _candidate_values(WIDTH_CANDIDATES, source.d_model)]
    whole = [[each for each in column if _can_shard(each, options)] for column in columns]
    if whole != columns:
        notes.append(f"Shapes whose heads or hidden units {options.world_size} devices cannot share are left out.")
    around = [each for column in whole for each in _configs_near_budget(column, options, memory_budget, total)]
    around = _limit_table(MAX_TABLE_SIZE, around, (num_layers(source), source.d_model))
    if not around and (every := [each for column in whole for each in column]):
        smallest = min(every, key=lambda config: count_parameters(config).total)
        if total(smallest) > memory_budget:
            around = [smallest]
            notes.append("Not even the smallest shape fits.")
        else:
            around = [column[-1] for column in whole if column][-MAX_TABLE_SIZE:]
            notes.append("Every shape fits many times over; the largest are listed.")
    encoder, layers = source.stacks.get("encoder"), num_layers(source)
    if encoder is not None and encoder.layers != layers:
        notes.append(f"Layers are the decoder's; the encoder has {encoder.layers} for every {layers} of them.")
    listed = [
        ModelShape(
            num_layers(each),
            each.d_model,
            num_heads(each),
            count_parameters(each).total,
            total(each),
            total(each) <= memory_budget,
        )
        for each in around
    ]
    return tuple(sorted(listed, key=lambda shape: (shape.layers, shape.d_model))), " ".join(notes)


def _candidate_values(candidates: tuple[int, ...], own_value: int) -> list[int]:
    """The usual values with the source's own, which stands for those within a tenth of it."""
    return sorted({own_value, *(value for value in candidates if abs(value - own_value) > own_value / 10)})


def _configs_at_width(source: Config, d_model: int) -> list[Config]:
    """A width's shapes by depth, as far as they are usual; the source's own is always among them."""
    own, least = num_layers(source), min_layers(source)
    if d_model < max_head_dim(source) and d_model != source.d_model:
        return []
    depths = [
        layers
        for layers in _candidate_values(LAYER_CANDIDATES, own)
        if (layers >= least and MIN_ASPECT_RATIO * layers <= d_model <= MAX_ASPECT_RATIO * layers)
        or (layers, d_model) == (own, source.d_model)
    ]
    return [scale_config(source, layers, d_model) for layers in depths]


def _can_shard(config: Config, options: SizeOptions) -> bool:
    """Whether the devices can share it."""
    try:
        shard_config(config, options.parallel_dims.tp)
    except InputError:
        return False
    return True


def _min_weight_bytes(config: Config, options: SizeOptions) -> int:
    """What its weights take at least, without a pass over its layers."""
    return count_parameters(config).total * options.precision.weight_bits // 8 // options.world_size


def _configs_near_budget(
    configs: list[Config], options: SizeOptions, memory_budget: int, total_bytes: Callable[[Config], int]
) -> list[Config]:
    """Those of a width, from shallow to deep, that are near the budget.

    Deep ones are costly to measure and each layer adds about as much as the last, so a line through the two shallowest
    tells which are worth it; their totals are then exact.
    """
    light = [each for each in configs if _min_weight_bytes(each, options) <= MAX_BUDGET_FRACTION * memory_budget]
    if len(light) < 2:
        return [
            each
            for each in light
            if MIN_BUDGET_FRACTION * memory_budget <= total_bytes(each) <= MAX_BUDGET_FRACTION * memory_budget
        ]
    (low, start), (high, end) = ((num_layers(each), total_bytes(each)) for each in light[:2])
    near = [start + (end - start) * (num_layers(each) - low) / (high - low) for each in light]
    first, beyond = bisect_left(near, MIN_BUDGET_FRACTION * memory_budget), bisect_right(near, memory_budget)
    return [each for each, about in zip(light, near, strict=True) if about <= MAX_BUDGET_FRACTION * memory_budget][
        first : beyond + 1
    ]


def _limit_table(max_size: int, configs: list[Config], own_shape: tuple[int, int]) -> list[Config]:
    """A table of at most so many widths and depths: those with the most shapes, and the source's own."""
    for kind, mine in ((lambda config: config.d_model, own_shape[1]), (num_layers, own_shape[0])):
        counted = Counter(kind(each) for each in configs)
        kept = set(sorted(counted, key=lambda value: (value == mine, counted[value], value))[-max_size:])
        configs = [each for each in configs if kind(each) in kept]
    return configs
