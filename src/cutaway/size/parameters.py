"""Exact parameter counts in closed form. A test compares them with the built model."""

from collections.abc import Iterator
from dataclasses import dataclass

from cutaway.config.attention import Cross, LatentAttention, MultiHead, MultiHeadBase, QKNorm
from cutaway.config.embedding import Embedding
from cutaway.config.ffn import FFN, Mlp, Moe
from cutaway.config.head import ClassificationHead, EmbeddingHead, LMHead, MultipleChoiceHead, NoHead
from cutaway.config.norms import LayerNorm, NoNorm, Norm
from cutaway.config.positions import Disentangled, LearnedPosition, RelativeBias, SinusoidalPosition
from cutaway.config.stack import Block, CrossBlock, ParallelResidual, PreNorm, SandwichNorm, Stack
from cutaway.config.transformer import Config, Encoder, EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class LayerParameterCounts:
    """Parameter counts of one layer.

    `active_ffn` counts the FFN parameters that a token uses: router, top-k experts and shared expert."""

    stack: str
    """`encoder` or `decoder`."""
    attention: int
    cross_attention: int
    ffn: int
    active_ffn: int
    norm: int
    shared_with: int | None = None
    """Index of the earlier layer whose weights this layer shares (ALBERT). The weights are counted in that layer."""

    @property
    def total(self) -> int:
        return self.attention + self.cross_attention + self.ffn + self.norm

    @property
    def active(self) -> int:
        return self.total - self.ffn + self.active_ffn


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameter counts by component.

    Shared parameters (a tied head, ALBERT's layers) are counted where they are first used. Constants and buffers
    (computed sinusoids and RoPE angles, ALiBi slopes, a fixed bias, a selection bias) are not counted."""

    embedding: int
    """Token embedding tables."""
    positions: int
    """Position embedding tables."""
    token_types: int
    embedding_projection: int
    embedding_norm: int
    per_layer: tuple[LayerParameterCounts, ...]
    """Encoder layers, then decoder layers."""
    final_norm: int
    head: int
    """Output matrix (of tokens, if it is not tied to the embedding, or of labels), and its bias."""
    head_transform: int
    pooler: int

    @property
    def unique_layers(self) -> tuple[LayerParameterCounts, ...]:
        """Layers that do not share the weights of an earlier layer."""
        return tuple(layer for layer in self.per_layer if layer.shared_with is None)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return len({layer.stack for layer in self.per_layer}) == 2

    @property
    def non_layer(self) -> int:
        ends = self.embedding + self.positions + self.token_types + self.embedding_projection + self.embedding_norm
        return ends + self.final_norm + self.head + self.head_transform + self.pooler

    @property
    def total(self) -> int:
        return self.non_layer + sum(layer.total for layer in self.unique_layers)

    @property
    def active(self) -> int:
        """Number of parameters, counting only top_k experts of each MoE layer. Embedding tables count in full."""
        return self.non_layer + sum(layer.active for layer in self.unique_layers)

    @property
    def non_embedding(self) -> int:
        """Number of parameters without token, position and token-type embeddings, output matrix and output bias."""
        return self.total - self.embedding - self.positions - self.token_types - self.head


def count_parameters(config: Config) -> ParameterCounts:
    """Count the parameters of a model from its configuration."""
    d, stacks = config.d_model, config.stacks
    embeddings = [stack.embedding for stack in stacks.values()]
    return ParameterCounts(
        embedding=_count_token_embeddings(config),
        positions=sum(_count_position_embeddings(embedding, d) for embedding in embeddings),
        token_types=sum(embedding.token_types * embedding.position_dim(d) for embedding in embeddings),
        embedding_projection=sum(_count_embedding_projection(embedding, d) for embedding in embeddings),
        embedding_norm=sum(_count_norm(embedding.norm, embedding.norm_dim(d)) for embedding in embeddings),
        per_layer=tuple(layer for name, stack in stacks.items() for layer in _count_layers(name, stack, d)),
        final_norm=sum(_count_norm(stack.norm, d) for stack in stacks.values() if stack.placement.final_norm),
        head=_count_head(config),
        head_transform=_count_head_transform(config),
        pooler=_count_linear(d, d, bias=True) if isinstance(config, Encoder) and config.pooler else 0,
    )


# ---------------------------------------------------------------------------------------- linear and norm


def _count_linear(inputs: int, outputs: int, *, bias: bool) -> int:
    """Number of parameters of a linear layer: inputs · outputs, plus outputs if it has a bias."""
    return inputs * outputs + bias * outputs


def _count_norm(norm: Norm, width: int) -> int:
    """Number of parameters of a norm. LayerNorm: a gain and a bias per dimension, if enabled. RMSNorm: only a gain."""
    if isinstance(norm, NoNorm):
        return 0
    return width * (norm.gain + norm.bias) if isinstance(norm, LayerNorm) else width


# ---------------------------------------------------------------------------------------- embedding and head


def _count_token_embeddings(config: Config) -> int:
    """Number of parameters of the token embedding tables: vocab_size · width each.

    Encoder and decoder share one table unless source_vocab_size is set."""
    widths = {name: stack.embedding.token_table_dim(config.d_model) for name, stack in config.stacks.items()}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is not None:
        return config.source_vocab_size * widths["encoder"] + config.vocab_size * widths["decoder"]
    return config.vocab_size * next(iter(widths.values()))


def _count_position_embeddings(embedding: Embedding, d_model: int) -> int:
    """Number of parameters of the position embedding table.

    (length + offset) · width for learned positions, length · width for sinusoids in a frozen table, else 0."""
    position, rows = embedding.position, 0
    if isinstance(position, LearnedPosition):
        rows = position.length + position.offset
    elif isinstance(position, SinusoidalPosition):
        rows = position.table_length or 0
    return rows * embedding.position_dim(d_model)


def _count_embedding_projection(embedding: Embedding, d_model: int) -> int:
    """Number of parameters of the projection of a factorized embedding: width · d_model plus bias. Else 0."""
    factor = embedding.factorization
    return 0 if factor is None else _count_linear(factor.width, d_model, bias=factor.bias)


def _head_input_width(config: Config, head: LMHead) -> int:
    """Input dimension of the output matrix: the width of the token table if tied, else d_model."""
    *_, last = config.stacks.values()
    return last.embedding.token_table_dim(config.d_model) if head.tied else config.d_model


def _count_head(config: Config) -> int:
    """Number of parameters of the head.

    LM head: vocab_size · width unless it is tied, plus vocab_size for a learned bias. Heads of tasks: d_model · labels
    (or · dimension of the projection), plus the bias."""
    head = config.head
    if isinstance(head, ClassificationHead):
        return _count_linear(config.d_model, head.num_labels, bias=head.bias)
    if isinstance(head, MultipleChoiceHead):
        return _count_linear(config.d_model, 1, bias=head.bias)
    if isinstance(head, EmbeddingHead) and head.projection is not None:
        return _count_linear(config.d_model, head.projection.dim, bias=head.projection.bias)
    if not isinstance(head, LMHead):
        return 0
    matrix = 0 if head.tied else config.vocab_size * _head_input_width(config, head)
    return matrix + (config.vocab_size if head.bias == "learned" else 0)


def _count_head_transform(config: Config) -> int:
    """Number of parameters of the transform before the output matrix: d_model · width, plus its bias and its norm."""
    head = config.head
    transform = None if isinstance(head, EmbeddingHead | NoHead) else head.transform
    if transform is None:
        return 0
    width = _head_input_width(config, head) if isinstance(head, LMHead) else config.d_model
    return _count_linear(config.d_model, width, bias=transform.bias) + _count_norm(transform.norm, width)


# ---------------------------------------------------------------------------------------- layers


def _count_layers(name: str, stack: Stack, d_model: int) -> Iterator[LayerParameterCounts]:
    """Yield the parameter counts of each layer.

    A relative bias has buckets · heads parameters. Tables that layers share are counted in the first of these layers.
    """
    counted_tables: set[tuple[object, ...]] = set()
    first_with_weights: dict[int, int] = {}
    for index, (block, weight_set) in enumerate(zip(stack.blocks, stack.weight_sets, strict=True)):
        if isinstance(block.attention, LatentAttention):
            attention = _count_latent(block.attention, d_model)
        else:
            attention = _count_multi_head(block.attention, d_model)
        position, heads = block.attention.position, block.attention.heads
        if isinstance(position, RelativeBias) and not (position.shared and (position, heads) in counted_tables):
            attention += position.buckets * heads
            counted_tables.add((position, heads))
        if isinstance(position, Disentangled):
            attention += _count_disentangled(
                position, block.attention, d_model, is_first=(position,) not in counted_tables
            )
            counted_tables.add((position,))
        first = first_with_weights.setdefault(weight_set, index)
        yield LayerParameterCounts(
            stack=name,
            attention=attention,
            cross_attention=_count_multi_head(block.cross, d_model) if isinstance(block, CrossBlock) else 0,
            ffn=_count_ffn(block.ffn, d_model),
            active_ffn=_count_active_ffn(block.ffn, d_model),
            norm=_count_norm(stack.norm, d_model) * _num_norms(stack, first, block),
            shared_with=None if first == index else first,
        )


def _num_norms(stack: Stack, layer_index: int, block: Block) -> int:
    """Number of norms of a block: one per sublayer, or two with sandwich norm.

    The sublayers of a parallel residual may share one norm, and the first layer may have no pre-norm."""
    sublayers = 3 if isinstance(block, CrossBlock) else 2
    match stack.placement:
        case SandwichNorm():
            return 2 * sublayers
        case ParallelResidual(norms="one"):
            return sublayers - 1
        case PreNorm(skip_first_prenorm=True) if layer_index == 0:
            return sublayers - 1
        case _:
            return sublayers


def _count_multi_head(attention: MultiHead | Cross, d_model: int) -> int:
    """Number of parameters of multi-head attention, including biases, QK-norm and one sink per head.

    d · H·d_head for q and o each, d · H_kv·d_head for k and v each."""
    d_head = attention.head_dim(d_model)
    q, kv = attention.heads * d_head, attention.num_kv_heads * d_head
    widths = {"q": q, "k": kv, "v": kv}
    projections = sum(_count_linear(d_model, width, bias=p in attention.bias) for p, width in widths.items())
    out = _count_linear(q, d_model, bias="o" in attention.bias)
    sink = attention.heads if isinstance(attention, MultiHead) and attention.sink else 0
    return projections + out + _count_qk_norm(attention.qk_norm, attention, d_head) + sink


def _count_disentangled(
    position: Disentangled, attention: MultiHead | LatentAttention, d_model: int, *, is_first: bool
) -> int:
    """Number of parameters of relative position embeddings: 2 · span · d and a norm, in the first layer that uses them.

    Each layer has d · H·d_head for position queries and d · H_kv·d_head for position keys, unless it shares q and k."""
    assert isinstance(attention, MultiHead)
    table = 2 * position.span * d_model + _count_norm(position.norm, d_model) if is_first else 0
    if position.share_att_key:
        return table
    d_head, bias = attention.head_dim(d_model), attention.bias
    matrices = {"p2c": (attention.heads, "q" in bias), "c2p": (attention.num_kv_heads, "k" in bias)}
    used = (matrices[term] for term in position.pos_att_type)
    return table + sum(_count_linear(d_model, heads * d_head, bias=has_bias) for heads, has_bias in used)


def _count_qk_norm(qk_norm: QKNorm | None, attention: MultiHeadBase, d_head: int) -> int:
    """Number of QK-norm parameters.

    Queries and keys have d_head gains each; with gain_per_head or over='full', each head has d_head gains."""
    if qk_norm is None:
        return 0
    gain_per_dimension = qk_norm.over == "full" or qk_norm.gain_per_head
    vectors = attention.heads + attention.num_kv_heads if gain_per_dimension else 2
    return _count_norm(qk_norm.norm, vectors * d_head)


def _count_latent(attention: LatentAttention, d_model: int) -> int:
    """Number of parameters of multi-head latent attention (MLA), including the norms on the latents.

    q: d · r_q down and r_q · H·(nope + rope) up, or d · H·(nope + rope) without a query latent. Keys and values:
    d · (r_kv + rope) down and r_kv · H·(nope + value) up. o: H·value · d."""
    heads, bias = attention.heads, attention.bias
    q_width = heads * (attention.d_nope + attention.d_rope)
    if attention.q_rank is None:
        q = _count_linear(d_model, q_width, bias=False)
    else:
        down = _count_linear(d_model, attention.q_rank, bias=bias) + _count_norm(attention.norm, attention.q_rank)
        q = down + _count_linear(attention.q_rank, q_width, bias=False)
    down = _count_linear(d_model, attention.kv_rank + attention.d_rope, bias=bias)
    down += _count_norm(attention.norm, attention.kv_rank)
    kv_up = _count_linear(attention.kv_rank, heads * (attention.d_nope + attention.d_value), bias=False)
    return q + down + kv_up + _count_linear(heads * attention.d_value, d_model, bias=bias)


def _count_ffn(ffn: FFN, d_model: int) -> int:
    """Number of FFN parameters. MLP: 2 · d · hidden; gated: 3 · d · hidden; MoE: router, all experts, shared expert."""
    if isinstance(ffn, Moe):
        return _count_router_and_shared_expert(ffn, d_model) + ffn.experts * _count_ffn(ffn.expert, d_model)
    hidden = ffn.hidden_dim(d_model)
    inputs = 1 if isinstance(ffn, Mlp) else 2
    return inputs * _count_linear(d_model, hidden, bias=ffn.bias) + _count_linear(hidden, d_model, bias=ffn.bias)


def _count_active_ffn(ffn: FFN, d_model: int) -> int:
    """Number of FFN parameters that one token uses. Of the experts of an MoE, only top_k are counted."""
    if isinstance(ffn, Moe):
        return _count_router_and_shared_expert(ffn, d_model) + ffn.router.top_k * _count_ffn(ffn.expert, d_model)
    return _count_ffn(ffn, d_model)


def _count_router_and_shared_expert(moe: Moe, d_model: int) -> int:
    """Number of parameters of the router (d_model · experts and bias), the shared expert and its gate.

    The router's selection bias is a buffer and not counted."""
    router = _count_linear(d_model, moe.experts, bias=moe.router.bias)
    gate = d_model if moe.shared_gate else 0
    return router + gate + (_count_ffn(moe.shared, d_model) if moe.shared is not None else 0)
