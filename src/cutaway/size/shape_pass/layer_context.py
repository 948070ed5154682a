"""What layers share on sizes: angles, masks and biases, made once for all that can use them."""

from dataclasses import dataclass
from typing import Any

from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.positions import Alibi, RelativeBias, Rope
from cutaway.config.stack import CrossBlock, Stack
from cutaway.size.shape_pass.attention_kernels import MaskShape, resolve_kernel
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey


def count_visible_pairs(num_queries: int, num_keys: int, window: int | None, *, causal: bool) -> int:
    """(query, key) pairs that see each other, when the queries are the last of the keys.

    A query at position p sees p + 1 keys, or all; with a window, those less than `window` away.
    """
    first = num_keys - num_queries
    reach = num_keys if window is None else window
    back = _sum_positive_range(first + 1, num_keys) - _sum_positive_range(
        first + 1 - reach, num_keys - reach
    )  # itself and before
    ahead = (
        0 if causal else _sum_positive_range(0, num_queries - 1) - _sum_positive_range(1 - reach, num_queries - reach)
    )  # after it
    return back + ahead


def _sum_positive_range(low: int, high: int) -> int:
    """Σ of max(n, 0) for n from low to high."""
    low = max(low, 1)
    return (low + high) * (high - low + 1) // 2 if high >= low else 0


@dataclass
class RopeTables:
    """cos and sin of every token's angles."""

    cos: ShapeTensor
    sin: ShapeTensor


@dataclass
class LayerContext:
    """What a layer is given beside the stream."""

    mask: MaskShape
    rope_tables: RopeTables | None
    use_cache: bool = False
    """Keys and values are read from a cache, whose memory is counted elsewhere."""
    memory: ShapeTensor | None = None
    memory_mask: MaskShape | None = None
    memory_cached: bool = False
    """The source's keys and values are in the cache too."""


class LayerContextBuilder:
    """Angles and masks, made once for all the layers of a stack that can share them."""

    def __init__(
        self,
        tape: Tape,
        stack: Stack,
        d_model: int,
        *,
        causal: bool,
        seq_len: int,
        num_cached_tokens: int,
        use_cache: bool,
        source_cached: bool,
    ) -> None:
        self.tape, self.d_model, self.causal = tape, d_model, causal
        self.seq_len, self.num_cached_tokens, self.use_cache, self.source_cached = (
            seq_len,
            num_cached_tokens,
            use_cache,
            source_cached,
        )
        self.mask_batch_size = tape.execution.mask_batch_size or 1
        self.rope_tables: dict[Any, RopeTables] = {}
        self.mask_shapes: dict[Any, MaskShape] = {}
        self.bias_owners: dict[Any, int] = {}
        self.blocks = stack.blocks
        tape.component = "rope and masks"
        for each in self.blocks:
            self.rope_tables_for(each.attention)
        for index in range(stack.layers):
            self.mask_for(index)

    def context_for(self, layer_index: int, memory: ShapeTensor | None) -> LayerContext:
        each = self.blocks[layer_index]
        context = LayerContext(self.mask_for(layer_index), self.rope_tables_for(each.attention), self.use_cache, memory)
        context.memory_cached = self.source_cached
        if isinstance(each, CrossBlock) and memory is not None:
            context.memory_mask = self.cross_attention_mask(each, memory)
        return context

    def rope_tables_for(self, attention: MultiHead | LatentAttention) -> RopeTables | None:
        position = attention.position
        if not isinstance(position, Rope):
            return None
        width = attention.d_rope if isinstance(attention, LatentAttention) else attention.head_dim(self.d_model)
        pairs = (position.rotary_dim or width) // 2
        kind = position, attention.heads, width
        if kind not in self.rope_tables:
            shape, dtype = (self.mask_batch_size, self.seq_len, 1, pairs), max(4, self.tape.execution.resid_itemsize)
            self.rope_tables[kind] = RopeTables(self.tape.empty(shape, dtype), self.tape.empty(shape, dtype))
        return self.rope_tables[kind]

    def mask_for(self, layer_index: int) -> MaskShape:
        tape, attention = self.tape, self.blocks[layer_index].attention
        keys, window = self.num_cached_tokens + self.seq_len, attention.window
        position = attention.position
        biased = position if isinstance(position, Alibi | RelativeBias) else None
        own = layer_index if isinstance(position, RelativeBias) and not position.shared else None
        softcap, sink = getattr(attention, "softcap", None), getattr(attention, "sink", False)
        kernel = resolve_kernel(tape.execution.kernel, softcap=softcap is not None, sink=sink)
        kind = None if biased is None else (position, attention.heads, own), window, kernel
        if kind in self.mask_shapes:
            return self.mask_shapes[kind]
        pairs = count_visible_pairs(self.seq_len, keys, window, causal=self.causal)
        mask = MaskShape(kernel, self.seq_len, keys, pairs)
        self.mask_shapes[kind] = mask
        narrow = window is not None and window < keys
        plain = self.num_cached_tokens == 0 and not narrow and biased is None and not tape.execution.mask_batch_size
        if kernel == "sdpa" and plain:
            return mask
        mask.fully_masked = tape.empty((self.mask_batch_size, 1, self.seq_len, 1), 1)
        if kernel == "flex":
            return mask
        mask.mask_tensor = tape.empty((self.mask_batch_size, 1, self.seq_len, keys), 1)
        if biased is not None:
            table = self.bias_owners.setdefault(
                (biased, attention.heads, own), layer_index
            )  # by the first layer that uses it
            bias = self.position_bias(biased, attention.heads, keys, (self.stack_name, table))
            if kernel == "sdpa":
                mask.mask_tensor = tape.record_op(
                    bias.shape, bias.itemsize, [bias], saved=[tape.empty(mask.mask_tensor.shape, 1)]
                )
            else:
                mask.bias = bias
        return mask

    @property
    def stack_name(self) -> str:
        return "decoder" if self.causal else "encoder"

    def position_bias(self, position: Alibi | RelativeBias, heads: int, num_keys: int, key: WeightKey) -> ShapeTensor:
        tape, shape = self.tape, (self.mask_batch_size, heads, self.seq_len, num_keys)
        if isinstance(position, Alibi):
            return tape.empty(shape, tape.execution.resid_itemsize)
        buckets = tape.empty((self.mask_batch_size, self.seq_len, num_keys), 8)
        table = Weight((*key, "relative_bias"), (position.buckets, heads))
        return tape.record_op(shape, tape.execution.resid_itemsize, saved=[buckets], weights=[table])

    def cross_attention_mask(self, block: CrossBlock, memory: ShapeTensor) -> MaskShape:
        cross = block.cross
        kernel = resolve_kernel(self.tape.execution.kernel, softcap=cross.softcap is not None, sink=False)
        keys = memory.shape[1]
        kind = "memory", kernel
        if kind not in self.mask_shapes:
            mask = self.mask_shapes[kind] = MaskShape(kernel, self.seq_len, keys, self.seq_len * keys)
            if kernel != "sdpa":
                mask.fully_masked = self.tape.empty((1, 1, self.seq_len, 1), 1)
            if kernel == "explicit":
                mask.mask_tensor = self.tape.empty((1, 1, self.seq_len, keys), 1)
        return self.mask_shapes[kind]
