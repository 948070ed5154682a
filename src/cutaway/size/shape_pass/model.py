"""Shape pass of the model: embedding, blocks, final norm, head."""

from collections.abc import Callable
from functools import partial

from cutaway.config.attention import LatentAttention
from cutaway.config.embedding import Embedding
from cutaway.config.positions import LearnedPosition, SinusoidalPosition
from cutaway.config.stack import Block, CrossBlock, OutputNorm, ParallelResidual, PostNorm, PreNorm, SandwichNorm, Stack
from cutaway.config.transformer import Config, Encoder, EncoderDecoder
from cutaway.size.shape_pass.adapters import LayerAdapter
from cutaway.size.shape_pass.attention import cross_attention, latent_attention, multi_head_attention
from cutaway.size.shape_pass.execution_config import PassShape
from cutaway.size.shape_pass.ffn import feed_forward
from cutaway.size.shape_pass.functional import add, dropout, norm
from cutaway.size.shape_pass.heads import run_head
from cutaway.size.shape_pass.layer_context import LayerContext, LayerContextBuilder
from cutaway.size.shape_pass.tape import Tape
from cutaway.size.shape_pass.tensor import ShapeTensor, Weight, WeightKey

Sublayer = Callable[[ShapeTensor], ShapeTensor]


def _run_block(
    tape: Tape,
    config: Block,
    stack: Stack,
    context: LayerContext,
    key: WeightKey,
    d_model: int,
    is_first: bool,
    x: ShapeTensor,
) -> ShapeTensor:
    """Run attention, cross-attention (if any) and FFN, with residual connections and the configured norm placement."""
    placement = stack.placement
    attention = config.attention
    rate = stack.dropout if stack.attention_resid_dropout is None else stack.attention_resid_dropout

    def attend(y: ShapeTensor) -> ShapeTensor:
        tape.component = "attention"
        if isinstance(attention, LatentAttention):
            return latent_attention(tape, y, attention, context, (*key, "attn"), d_model)
        return multi_head_attention(tape, y, attention, context, (*key, "attn"), d_model)

    def attend_to_memory(y: ShapeTensor) -> ShapeTensor:
        tape.component = "cross-attention"
        assert isinstance(config, CrossBlock)
        return cross_attention(tape, y, config.cross, context, (*key, "cross"), d_model)

    def run_ffn(y: ShapeTensor) -> ShapeTensor:
        tape.component = "ffn"
        return feed_forward(tape, y, config.ffn, (*key, "ffn"), d_model)

    def branch(y: ShapeTensor, f: Sublayer, name: str, rate: float, *, norm_in: bool, norm_out: bool) -> ShapeTensor:
        tape.component = "norms"
        y = f(norm(tape, y, stack.norm, (*key, name, "norm_in")) if norm_in else y)
        tape.component = "norms"
        y = norm(tape, y, stack.norm, (*key, name, "norm_out")) if norm_out else y
        tape.component = "residual"
        y = dropout(tape, y, rate)
        return y if stack.residual_scale == 1.0 else tape.record_op([y])

    def residual(x: ShapeTensor, f: Sublayer, name: str, rate: float, *, skip_prenorm: bool = False) -> ShapeTensor:
        norm_in = isinstance(placement, PreNorm | SandwichNorm) and not skip_prenorm
        skip = x
        if isinstance(placement, PostNorm) and placement.skip_scale != 1.0:
            skip = tape.record_op([x])
        if norm_in and isinstance(placement, PreNorm) and placement.norm_skip:
            tape.component = "norms"
            skip = norm(tape, x, stack.norm, (*key, name, "norm_in"))
        y = branch(x, f, name, rate, norm_in=norm_in, norm_out=isinstance(placement, SandwichNorm | OutputNorm))
        del x
        x = add(tape, skip, y)
        del skip
        tape.component = "norms"
        return norm(tape, x, stack.norm, (*key, name, "after")) if isinstance(placement, PostNorm) else x

    if isinstance(placement, ParallelResidual):
        separate_norms = placement.norms == "two"
        tape.component = "norms"
        h = x if separate_norms else norm(tape, x, stack.norm, (*key, "norm"))
        y = branch(h, attend, "attn", rate, norm_in=separate_norms, norm_out=False)
        x = add(tape, x, y)
        return add(tape, x, branch(h, run_ffn, "ffn", stack.dropout, norm_in=separate_norms, norm_out=False))
    skip_prenorm = is_first and isinstance(placement, PreNorm) and placement.skip_first_prenorm
    x = residual(x, attend, "attn", rate, skip_prenorm=skip_prenorm)
    if isinstance(config, CrossBlock):
        x = residual(x, attend_to_memory, "cross", rate)
    return residual(x, run_ffn, "ffn", stack.dropout)


def compute_hidden(tape: Tape, config: Config, shape: PassShape) -> ShapeTensor:
    batch_size, source_len, memory = shape.batch_size, shape.source_len, None
    if isinstance(config, EncoderDecoder):
        if shape.source_cached:
            memory = ShapeTensor((batch_size, source_len, config.d_model), 0, tape.empty((0,), 0).storage, None)
        else:
            memory = _run_stack(tape, config, "encoder", PassShape(batch_size, source_len, source_len), None)
    x = _run_stack(tape, config, "encoder" if isinstance(config, Encoder) else "decoder", shape, memory)
    if shape.serving:
        x = ShapeTensor((batch_size, 1, config.d_model), x.itemsize, x.storage, x.node)
    return x


def compute_logits(tape: Tape, x: ShapeTensor, config: Config) -> ShapeTensor:
    """Return the output of the head, or the hidden states of a model without a head."""
    tape.component = "logits"
    return run_head(tape, x, config)


def _run_stack(tape: Tape, config: Config, name: str, shape: PassShape, memory: ShapeTensor | None) -> ShapeTensor:
    """Run embedding, blocks and final norm of one stack."""
    stack, d_model = config.stacks[name], config.d_model
    tape.component = "embedding"
    x = _embed(tape, config, stack.embedding, name, shape.batch_size, shape.seq_len)
    contexts = LayerContextBuilder(tape, stack, d_model, shape, causal=name == "decoder")
    for index, (block, owner) in enumerate(zip(stack.blocks, stack.weight_sets, strict=True)):
        context = contexts.context_for(index, memory)
        key: WeightKey = (name, owner)
        run_block = partial(_run_block, tape, block, stack, context, key, d_model, owner == 0)
        x = tape.run_block(run_block, x, key, index)
    tape.component = "norms"
    if stack.placement.final_norm:
        x = norm(tape, x, stack.norm, (name, "final_norm"))
    return dropout(tape, x, stack.final_dropout)


def _embed(tape: Tape, config: Config, embedding: Embedding, name: str, batch_size: int, seq_len: int) -> ShapeTensor:
    d_model, dtype = config.d_model, tape.execution.weight_itemsize
    source_vocab_size = config.source_vocab_size if isinstance(config, EncoderDecoder) and name == "encoder" else None
    width, rows = embedding.token_table_dim(d_model), source_vocab_size or config.vocab_size
    key: WeightKey = ("source_tokens",) if source_vocab_size else ("tokens",)
    tokens = tape.empty((batch_size, seq_len), 8)
    table = Weight(key, (rows, width))
    x = tape.record_op([], shape=(batch_size, seq_len, width), itemsize=dtype, saved=[tokens], weights=[table])
    adapter = None if tape.execution.base is None else tape.execution.base.adapters.get(key)
    if adapter is not None:
        x = _add_low_rank_embedding(tape, x, tokens, table, adapter)
    if tape.execution.tp > 1:  # vocabulary-parallel lookup: tokens of other ranks are masked to zero, then all-reduced
        x = tape.reduce_from_tp_region(tape.record_op([x], saved=[tape.empty((batch_size, seq_len), 1)]))
    if embedding.resolve_scale(d_model) != 1.0:
        x = tape.record_op([x])
    factor = embedding.factorization
    if factor is not None and factor.positions == "after_projection":
        x = tape.linear(x, d_model, (name, "project"), bias=factor.bias, component="embedding")
    position_dim = x.shape[-1]
    match embedding.position:
        case LearnedPosition(length=limit, offset=offset):
            table = Weight((name, "positions"), (limit + offset, position_dim))
            shape, positions = (1, seq_len, position_dim), tape.empty((1, seq_len), 8)
            position_embedding = tape.record_op([], shape=shape, itemsize=dtype, saved=[positions], weights=[table])
            x = tape.record_op([x, tape.cast(position_embedding, x.itemsize)], passes_grad_through=True)
        case SinusoidalPosition():
            x = tape.record_op([x], passes_grad_through=True)
    if embedding.token_types:
        table = Weight((name, "types"), (embedding.token_types, position_dim))
        x = tape.record_op([x], itemsize=dtype, weights=[table], passes_grad_through=x.itemsize == dtype)
    if factor is not None and factor.norm_after_projection:
        x = tape.linear(x, d_model, (name, "project"), bias=factor.bias, component="embedding")
    x = dropout(tape, norm(tape, x, embedding.norm, (name, "embedding_norm")), embedding.dropout)
    if factor is not None and factor.positions == "before_projection" and not factor.norm_after_projection:
        x = tape.linear(x, d_model, (name, "project"), bias=factor.bias, component="embedding")
    return tape.cast(x, tape.execution.resid_itemsize) if tape.execution.resid_in_compute_dtype else x


def _add_low_rank_embedding(
    tape: Tape, x: ShapeTensor, tokens: ShapeTensor, table: Weight, adapter: LayerAdapter
) -> ShapeTensor:
    """Record x + s·(B·A)ᵀ[tokens], the embedding with a LoRA adapter."""
    execution, (rows, width) = tape.execution, table.shape
    assert execution.base is not None
    itemsize = execution.base.adapter_itemsize
    lora_a = Weight((*table.key, "lora_a"), (adapter.rank, rows), itemsize=itemsize)
    lora_b = Weight((*table.key, "lora_b"), (width, adapter.rank), in_matmul=True, itemsize=itemsize)
    shape = (*tokens.shape, adapter.rank)
    low_rank = tape.record_op([], shape=shape, itemsize=itemsize, saved=[tokens], weights=[lora_a])
    low_rank = tape.cast(low_rank, execution.compute_itemsize if execution.autocast else itemsize)
    needs_copy = execution.autocast and execution.compute_itemsize != itemsize
    flops = 2 * low_rank.numel * width
    delta = tape.record_op(
        [low_rank],
        shape=x.shape,
        saved=[low_rank, *([tape.uncached_copy(lora_b)] if needs_copy else [])],
        weights=[lora_b],
        matmuls=[("adapters", flops, flops)],
        backward_matmuls=[("adapters", 2 * flops, 2 * flops)],
    )
    delta = tape.cast(tape.record_op([delta]), x.itemsize)
    return tape.record_op([x, delta], passes_grad_through=True)
