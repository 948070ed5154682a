"""Layer contexts of a shape pass: RoPE tables, masks and position biases. Equal ones are shared between layers."""

from dataclasses import dataclass

from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.positions import Alibi, Disentangled, RelativeBias, Rope
from cutaway.config.stack import CrossBlock, Stack
from cutaway.errors import KernelError
from cutaway.size.shape_pass.attention_kernels import MaskShape, RelativePositions, resolve_kernel
from cutaway.size.shape_pass.execution_config import PassShape
from cutaway.size.shape_pass.functional import norm
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey


def _count_visible_pairs(num_queries: int, num_keys: int, window: int | None, *, causal: bool) -> int:
    """Number of visible (query, key) pairs if the queries are at the last `num_queries` positions of the keys.

    The query at position p attends to keys 0 … p if causal, else to all keys. A window limits these to keys that are
    less than `window` positions away.
    """
    num_past = num_keys - num_queries
    reach = num_keys if window is None else window
    # First the pairs with keys up to the query, then, if not causal, the pairs with keys after the query.
    past = _sum_positive_range(num_past + 1, num_keys) - _sum_positive_range(num_past + 1 - reach, num_keys - reach)
    if causal:
        return past
    return past + _sum_positive_range(0, num_queries - 1) - _sum_positive_range(1 - reach, num_queries - reach)


def _sum_positive_range(low: int, high: int) -> int:
    """Σ max(n, 0) for n from low to high."""
    low = max(low, 1)
    return (low + high) * (high - low + 1) // 2 if high >= low else 0


RopeTables = tuple[ShapeTensor, ShapeTensor]
"""cos and sin of the rotation angles, (B, T, 1, D/2)."""


@dataclass
class LayerContext:
    """Inputs of a layer other than the residual stream."""

    mask: MaskShape
    rope_tables: RopeTables | None
    use_cache: bool = False
    """Whether keys and values are read from the KV cache, whose memory is counted elsewhere."""
    memory: ShapeTensor | None = None
    memory_mask: MaskShape | None = None
    memory_cached: bool = False
    """Whether the keys and values of cross-attention are cached too."""


class LayerContextBuilder:
    """Builds the layer contexts of a stack. Layers with equal RoPE tables or equal masks share them."""

    def __init__(self, tape: Tape, stack: Stack, d_model: int, shape: PassShape, *, causal: bool) -> None:
        self.tape, self.d_model, self.shape, self.causal = tape, d_model, shape, causal
        self.seq_len = shape.seq_len
        self.mask_batch_size = tape.execution.mask_batch_size or 1
        self.rope_tables: dict[tuple[object, ...], RopeTables] = {}
        self.mask_shapes: dict[tuple[object, ...], MaskShape] = {}
        self.bias_owners: dict[tuple[object, ...], int] = {}
        self.blocks = stack.blocks
        tape.component = "rope and masks"
        for block in self.blocks:
            self.rope_tables_for(block.attention)
        for index in range(stack.layers):
            self.mask_for(index)

    def context_for(self, layer_index: int, memory: ShapeTensor | None) -> LayerContext:
        block = self.blocks[layer_index]
        mask, rope_tables = self.mask_for(layer_index), self.rope_tables_for(block.attention)
        context = LayerContext(mask, rope_tables, self.shape.use_cache, memory)
        context.memory_cached = self.shape.source_cached
        if isinstance(block, CrossBlock) and memory is not None:
            context.memory_mask = self.cross_attention_mask(block, memory)
        return context

    def rope_tables_for(self, attention: MultiHead | LatentAttention) -> RopeTables | None:
        position = attention.position
        if not isinstance(position, Rope):
            return None
        rotary_width = attention.max_rotary_dim(self.d_model)
        num_pairs = (position.rotary_dim or rotary_width) // 2
        table_key = position, attention.heads, rotary_width
        if table_key not in self.rope_tables:
            shape = (self.mask_batch_size, self.seq_len, 1, num_pairs)
            dtype = max(4, self.tape.execution.resid_itemsize)
            self.rope_tables[table_key] = self.tape.empty(shape, dtype), self.tape.empty(shape, dtype)
        return self.rope_tables[table_key]

    def mask_for(self, layer_index: int) -> MaskShape:
        tape, attention = self.tape, self.blocks[layer_index].attention
        num_keys, window = self.shape.num_cached_tokens + self.seq_len, attention.window
        position = attention.position
        bias_position = position if isinstance(position, Alibi | RelativeBias) else None
        disentangled = position if isinstance(position, Disentangled) else None
        unshared_layer = layer_index if isinstance(position, RelativeBias) and not position.shared else None
        softcap, sink = getattr(attention, "softcap", None), getattr(attention, "sink", False)
        kernel = resolve_kernel(
            tape.execution, softcap=softcap is not None, sink=sink, has_position_scores=disentangled is not None
        )
        if disentangled is not None and kernel == "flex":
            raise KernelError("kernel 'flex' does not support position scores; use one of: sdpa, explicit")
        bias_key = None if bias_position is None else (position, attention.heads, unshared_layer)
        mask_key = disentangled if bias_key is None else bias_key, window, kernel
        if mask_key in self.mask_shapes:
            return self.mask_shapes[mask_key]
        num_visible = _count_visible_pairs(self.seq_len, num_keys, window, causal=self.causal)
        mask = MaskShape(kernel, self.seq_len, num_keys, num_visible)
        self.mask_shapes[mask_key] = mask
        needs_tensor = self.shape.num_cached_tokens > 0 or (window is not None and window < num_keys)
        needs_tensor = needs_tensor or bias_position is not None or tape.execution.mask_batch_size > 0
        needs_tensor = needs_tensor or disentangled is not None
        if kernel == "flex" or (kernel == "sdpa" and not needs_tensor):
            return mask
        mask.fully_masked = tape.empty((self.mask_batch_size, 1, self.seq_len, 1), 1)
        mask.mask_tensor = tape.empty((self.mask_batch_size, 1, self.seq_len, num_keys), 1)
        if disentangled is not None:
            owner = self.bias_owners.setdefault((disentangled,), layer_index)
            mask.relative_positions = self.relative_positions(disentangled, num_keys, (self.stack_name, owner))
        if bias_position is not None:
            # A shared bias table belongs to the first layer that uses it.
            owner = self.bias_owners.setdefault((bias_position, attention.heads, unshared_layer), layer_index)
            bias = self.position_bias(bias_position, attention.heads, num_keys, (self.stack_name, owner))
            if kernel == "sdpa":
                visible = tape.empty(mask.mask_tensor.shape, 1)
                mask.mask_tensor = tape.record_op([bias], saved=[visible])
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
        return tape.record_op([], shape=shape, itemsize=tape.execution.resid_itemsize, saved=[buckets], weights=[table])

    def relative_positions(self, position: Disentangled, num_keys: int, key: WeightKey) -> RelativePositions:
        """Relative position embeddings after their norm, (P, d), and the row for each query and key."""
        tape, shape, key = self.tape, (2 * position.span, self.d_model), (*key, "relative_positions")
        # The table is a parameter, so reading it allocates nothing.
        read = tape.record_op([], shape=(0,), itemsize=tape.execution.weight_itemsize, weights=[Weight(key, shape)])
        embeddings = norm(
            tape, ShapeTensor(shape, read.itemsize, read.storage, read.node), position.norm, (*key, "norm")
        )
        rows = tape.empty((self.mask_batch_size, 1, self.seq_len, num_keys), 8)
        return RelativePositions(position, embeddings, rows)

    def cross_attention_mask(self, block: CrossBlock, memory: ShapeTensor) -> MaskShape:
        cross = block.cross
        kernel = resolve_kernel(self.tape.execution, softcap=cross.softcap is not None, sink=False)
        num_keys = memory.shape[1]
        mask_key = ("memory", kernel)
        if mask_key not in self.mask_shapes:
            mask = self.mask_shapes[mask_key] = MaskShape(kernel, self.seq_len, num_keys, self.seq_len * num_keys)
            if kernel != "sdpa":
                mask.fully_masked = self.tape.empty((1, 1, self.seq_len, 1), 1)
            if kernel == "explicit":
                mask.mask_tensor = self.tape.empty((1, 1, self.seq_len, num_keys), 1)
        return self.mask_shapes[mask_key]
