"""Model scaling: change the depth and width of a configuration, and list the shapes near a memory budget."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import gcd

from cutaway.config.attention import LatentAttention, MultiHead, MultiHeadBase
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import DenseFFN, Gated, Mlp
from cutaway.config.head import LMHead
from cutaway.config.norms import LayerNorm
from cutaway.config.positions import LearnedPosition, NoPosition
from cutaway.config.stack import Block, Stack
from cutaway.config.transformer import Config, Decoder
from cutaway.errors import InputError
from cutaway.size.estimate import SizeEstimate
from cutaway.size.options import SizeOptions
from cutaway.size.parallel import shard_config
from cutaway.size.parameters import count_parameters

LAYER_CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
_WIDTH_CANDIDATES = (128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 12288, 16384)
_MIN_ASPECT_RATIO, _MAX_ASPECT_RATIO = 24, 192
"""Range of d_model / layers; nearly all published models are within it."""
_MAX_WIDTH_MULTIPLE = 128
"""A scaled width is a multiple of the largest power of two, up to this value, that divides the source's width."""

SCALING_FAMILIES = ("classic", "llama")
"""Families of shapes that can be used in place of a configuration."""

_MIN_BUDGET_FRACTION, _MAX_BUDGET_FRACTION = 1 / 8, 2
"""Fractions of the budget between which shapes are listed."""
MAX_TABLE_SIZE = 8
"""Maximum number of depths and of widths in a table of shapes."""


@dataclass(frozen=True)
class ModelShape:
    """Depth, width and memory of one scaled configuration."""

    layers: int
    """Number of layers; in an encoder-decoder, of the decoder."""
    d_model: int
    heads: int
    num_parameters: int
    total_bytes: int
    """Number of bytes per device at the given batch size and context."""
    fits: bool


def build_family_config(name: str, context: int | None = None) -> Config:
    """Build the configuration of a family ('classic' or 'llama') with 32 layers and d_model 4,096.

    The position table of 'classic' has at least `context` rows."""
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
    """The stack whose layers and heads are reported: the decoder, or the encoder of an encoder-only model."""
    return config.stacks["decoder" if "decoder" in config.stacks else "encoder"]


def num_layers(config: Config) -> int:
    return _main_stack(config).layers


def num_heads(config: Config) -> int:
    """Maximum number of query heads in the repeated block pattern of the stack that `_main_stack` returns."""
    return max(block.attention.heads for block in _main_stack(config).block)


def max_head_dim(config: Config) -> int:
    """Largest head dimension of all layers."""
    return max(block.attention.head_dim(config.d_model) for stack in config.stacks.values() for block in stack.blocks)


def min_layers(config: Config) -> int:
    """Minimum number of layers of a scaled configuration, at most the number of layers of `config`.

    Every stack must have room for its leading blocks and one full block pattern."""
    source_layers = num_layers(config)
    minimum = 1
    for stack in config.stacks.values():
        required = len(stack.leading_blocks) + len(stack.block)
        minimum = max(minimum, -(-required * source_layers // stack.layers))
    return min(minimum, source_layers)


def scale_config(config: Config, layers: int, d_model: int) -> Config:
    """Return `config` with this number of layers and d_model; with its own values, the result is equal to `config`.

    Unchanged are the head dimension, the ratio of FFN and latent dimensions to d_model, the GQA group size, leading
    blocks and block pattern, windows, experts, positions and vocabulary. The two stacks of an encoder-decoder keep
    their ratio of layers.
    """
    source_layers = num_layers(config)
    scale_attention = partial(_scale_attention, d_model=config.d_model, new_d_model=d_model)
    scale_ffn = partial(_scale_ffn, d_model=config.d_model, new_d_model=d_model)
    stacks: dict[str, Stack] = {}
    for name, stack in config.stacks.items():
        size = stack.layers_per_group
        repeats = max(1, _round_divide(stack.layers * layers, source_layers * size))
        new_layers = repeats * size
        groups = None if stack.layer_groups is None else min(stack.layer_groups, repeats)
        scaled = stack.edit_layers(scale_attention, scale_ffn)
        stacks[name] = scaled.replace(layers=new_layers, layer_groups=groups)
    return config.replace(d_model=d_model, **stacks)


def _scale_attention(
    attention: MultiHeadBase | LatentAttention, d_model: int, new_d_model: int
) -> MultiHeadBase | LatentAttention:
    heads = max(1, _round_divide(attention.heads * new_d_model, d_model))
    if isinstance(attention, LatentAttention):
        q_rank = None if attention.q_rank is None else _scale_width(attention.q_rank, d_model, new_d_model)
        kv_rank = _scale_width(attention.kv_rank, d_model, new_d_model)
        return attention.replace(heads=heads, q_rank=q_rank, kv_rank=kv_rank)
    d_head = attention.head_dim(d_model)
    implied = attention.d_head is None and heads * d_head == new_d_model
    return attention.replace(
        heads=heads, kv_heads=_scale_kv_heads(attention, heads), d_head=None if implied else d_head
    )


def _scale_kv_heads(attention: MultiHeadBase, new_heads: int) -> int | None:
    """Number of key-value heads: the divisor of `new_heads` that gives the GQA group size closest to the old one.

    The values of MHA (None) and MQA (1) are returned unchanged."""
    kv_heads = attention.kv_heads
    if kv_heads is None or kv_heads == 1:
        return kv_heads
    divisors = (count for count in range(1, new_heads + 1) if new_heads % count == 0)

    def ratio_error(count: int) -> float:
        ratio = count * attention.heads / (new_heads * kv_heads)
        return max(ratio, 1 / ratio)

    return min(divisors, key=ratio_error)


def _scale_ffn(ffn: DenseFFN, d_model: int, new_d_model: int) -> DenseFFN:
    """Scale the hidden dimension if it is set. If it is not set, the model derives it from d_model."""
    return ffn if ffn.hidden is None else ffn.replace(hidden=_scale_width(ffn.hidden, d_model, new_d_model))


def _scale_width(hidden_width: int, d_model: int, new_d_model: int) -> int:
    unit = gcd(hidden_width, _MAX_WIDTH_MULTIPLE)
    return max(1, _round_divide(hidden_width // unit * new_d_model, d_model)) * unit


def _round_divide(numerator: int, denominator: int) -> int:
    """numerator / denominator rounded to the nearest integer, in integer arithmetic."""
    return (2 * numerator + denominator) // (2 * denominator)


# ---------------------------------------------------------------------------------------- shapes near a budget


def list_shapes_near_budget(options: SizeOptions, memory_budget: int) -> tuple[tuple[ModelShape, ...], str]:
    """Return the model shapes whose memory is near the budget, and remarks on the list.

    For each width, depths are listed from the first that needs at least 1/8 of the budget to the first that exceeds
    the budget, if that one needs at most twice the budget. If no shape is near the budget, the smallest
    shape or the largest shapes are listed.
    """
    source, notes = options.config, []
    total = cache(lambda config: SizeEstimate(replace(options, config=config)).memory.total_bytes)
    columns = [_configs_at_width(source, width) for width in _candidate_values(_WIDTH_CANDIDATES, source.d_model)]
    shardable = [[config for config in column if _can_shard(config, options)] for column in columns]
    if shardable != columns:
        notes.append(
            f"Shapes whose heads or hidden dimension cannot be split over {options.world_size} devices are left out."
        )
    near_budget = (_configs_near_budget(column, options, memory_budget, total) for column in shardable)
    listed_configs = list(chain.from_iterable(near_budget))
    listed_configs = _limit_table(MAX_TABLE_SIZE, listed_configs, (num_layers(source), source.d_model))
    if not listed_configs and (all_configs := list(chain.from_iterable(shardable))):
        smallest = min(all_configs, key=lambda config: count_parameters(config).total)
        if total(smallest) > memory_budget:
            listed_configs = [smallest]
            notes.append("The smallest shape does not fit.")
        else:
            listed_configs = [column[-1] for column in shardable if column][-MAX_TABLE_SIZE:]
            notes.append("Every shape is far below the budget; the largest are listed.")
    encoder, layers = source.stacks.get("encoder"), num_layers(source)
    if encoder is not None and encoder.layers != layers:
        notes.append(f"Layers are those of the decoder; the encoder has {encoder.layers} per {layers} decoder layers.")
    shapes = []
    for config in sorted(listed_configs, key=lambda config: (num_layers(config), config.d_model)):
        parameters, nbytes = count_parameters(config).total, total(config)
        shape = num_layers(config), config.d_model, num_heads(config)
        shapes.append(ModelShape(*shape, parameters, nbytes, nbytes <= memory_budget))
    return tuple(shapes), " ".join(notes)


def _candidate_values(candidates: tuple[int, ...], own_value: int) -> list[int]:
    """Return `own_value` and the candidates that differ from it by more than 10 %, sorted."""
    return sorted({own_value, *(value for value in candidates if abs(value - own_value) > own_value / 10)})


def _configs_at_width(source: Config, d_model: int) -> list[Config]:
    """Scale `source` to width `d_model` and all depths in the range of d_model / layers; sort by depth.

    The source's own shape is included even if it is outside the range."""
    source_layers, minimum = num_layers(source), min_layers(source)
    if d_model < max_head_dim(source) and d_model != source.d_model:
        return []
    configs = []
    for layers in _candidate_values(LAYER_CANDIDATES, source_layers):
        in_range = layers >= minimum and _MIN_ASPECT_RATIO * layers <= d_model <= _MAX_ASPECT_RATIO * layers
        if in_range or (layers, d_model) == (source_layers, source.d_model):
            configs.append(scale_config(source, layers, d_model))
    return configs


def _can_shard(config: Config, options: SizeOptions) -> bool:
    """Whether the configuration can be split over the tensor-parallel ranks of `options`."""
    try:
        shard_config(config, options.parallel_dims.tp)
    except InputError:
        return False
    return True


def _configs_near_budget(
    configs: list[Config], options: SizeOptions, memory_budget: int, total_bytes: Callable[[Config], int]
) -> list[Config]:
    """Select those of `configs` (one width, sorted by depth) whose memory is near the budget.

    The memory of a deep configuration is slow to compute and memory is nearly linear in depth, so the selection
    extrapolates from the two shallowest configurations. The totals of the selected shapes are computed exactly.
    """
    minimum, maximum = _MIN_BUDGET_FRACTION * memory_budget, _MAX_BUDGET_FRACTION * memory_budget
    bytes_per_parameter = options.precision.weight_bits / 8 / options.world_size  # a lower bound of the memory
    candidates = [config for config in configs if count_parameters(config).total * bytes_per_parameter <= maximum]
    if len(candidates) < 2:
        return [config for config in candidates if minimum <= total_bytes(config) <= maximum]
    (low, start), (high, end) = ((num_layers(config), total_bytes(config)) for config in candidates[:2])
    estimates = [start + (end - start) * (num_layers(config) - low) / (high - low) for config in candidates]
    first, last = bisect_left(estimates, minimum), bisect_right(estimates, memory_budget)
    return candidates[first : min(last + 1, bisect_right(estimates, maximum))]


def _limit_table(max_size: int, configs: list[Config], own_shape: tuple[int, int]) -> list[Config]:
    """Keep the configurations of at most `max_size` widths and of at most `max_size` depths.

    The source's own width and depth (`own_shape`: layers, d_model) and the most frequent other values are kept."""
    for dimension, own_value in ((lambda config: config.d_model, own_shape[1]), (num_layers, own_shape[0])):
        counts = Counter(dimension(config) for config in configs)
        selected = set(sorted(counts, key=lambda value: (value == own_value, counts[value], value))[-max_size:])
        configs = [config for config in configs if dimension(config) in selected]
    return configs
