"""Exact parameter counts, as closed forms over a configuration. A test holds them equal to the built model's."""

from collections.abc import Iterator
from dataclasses import dataclass

from cutaway.config.attention import Cross, Heads, Latent, MultiHead, QKNorm
from cutaway.config.embedding import Embedding, Head
from cutaway.config.ffn import FFN, Mlp, Moe
from cutaway.config.norms import LayerNorm, NoNorm, Norm
from cutaway.config.positions import Learned, RelativeBias, Sinusoidal
from cutaway.config.stack import Block, CrossBlock, Parallel, Pre, Sandwich, Stack
from cutaway.config.transformer import Config, Encoder, EncoderDecoder


@dataclass(frozen=True, kw_only=True)
class LayerParams:
    """One layer. `ffn_active` is what one token multiplies: the router, its top-k experts and the shared expert."""

    stack: str
    """`encoder` or `decoder`."""
    attention: int
    cross: int
    ffn: int
    ffn_active: int
    norm: int
    same_as: int | None = None
    """The earlier layer of the stack whose weights this one uses again (ALBERT); they are counted there."""

    @property
    def total(self) -> int:
        return self.attention + self.cross + self.ffn + self.norm

    @property
    def active(self) -> int:
        return self.total - self.ffn + self.ffn_active


@dataclass(frozen=True, kw_only=True)
class Params:
    """Every parameter once. What is shared (a tied head, ALBERT's layers) counts where it is first used; what is
    fixed (sinusoids and angles as computed, ALiBi's slopes, a fixed bias, a selection bias) does not count."""

    embedding: int
    """Token tables."""
    positions: int
    """Learned position tables."""
    types: int
    embedding_projection: int
    embedding_norm: int
    per_layer: tuple[LayerParams, ...]
    """The encoder's layers, then the decoder's."""
    final_norm: int
    head: int
    """The output matrix if it is not the token table, and its bias."""
    head_transform: int
    pooler: int

    @property
    def layers(self) -> tuple[LayerParams, ...]:
        """The layers that have weights of their own."""
        return tuple(layer for layer in self.per_layer if layer.same_as is None)

    @property
    def two_sided(self) -> bool:
        """Whether there is an encoder and a decoder."""
        return len({layer.stack for layer in self.per_layer}) == 2

    @property
    def outside_layers(self) -> int:
        ends = self.embedding + self.positions + self.types + self.embedding_projection + self.embedding_norm
        return ends + self.final_norm + self.head + self.head_transform + self.pooler

    @property
    def total(self) -> int:
        return self.outside_layers + sum(layer.total for layer in self.layers)

    @property
    def active(self) -> int:
        """The total with only the routed experts that one token reaches; tables are kept whole."""
        return self.outside_layers + sum(layer.active for layer in self.layers)

    @property
    def non_embedding(self) -> int:
        """The total without what is looked up (tokens, positions, types) and without the output matrix and its bias."""
        return self.total - self.embedding - self.positions - self.types - self.head


def count(config: Config) -> Params:
    """The parameters of the model that `config` describes."""
    d, stacks = config.d_model, config.stacks
    embeddings = [stack.embedding for stack in stacks.values()]
    return Params(
        embedding=_token_tables(config),
        positions=sum(_positions(embedding, d) for embedding in embeddings),
        types=sum(embedding.types * embedding.sum_width(d) for embedding in embeddings),
        embedding_projection=sum(_embedding_projection(embedding, d) for embedding in embeddings),
        embedding_norm=sum(_norm(embedding.norm, embedding.sum_width(d)) for embedding in embeddings),
        per_layer=tuple(layer for name, stack in stacks.items() for layer in _layers(name, stack, d)),
        final_norm=sum(_norm(stack.norm, d) for stack in stacks.values() if stack.placement.final_norm),
        head=_head(config),
        head_transform=_head_transform(config),
        pooler=_linear(d, d, bias=True) if isinstance(config, Encoder) and config.pooler else 0,
    )


# ---------------------------------------------------------------------------------------- the smallest parts


def _linear(inputs: int, outputs: int, *, bias: bool) -> int:
    """inputs · outputs, and a bias an output."""
    return inputs * outputs + bias * outputs


def _norm(norm: Norm, width: int) -> int:
    """LayerNorm: a gain and a bias a dimension, where it has them. RMSNorm: a gain a dimension."""
    if isinstance(norm, NoNorm):
        return 0
    return width * (norm.gain + norm.bias) if isinstance(norm, LayerNorm) else width


# ---------------------------------------------------------------------------------------- the two ends


def _token_tables(config: Config) -> int:
    """V · w for each table; two sides share one unless the source has a vocabulary of its own."""
    widths = {name: stack.embedding.table_width(config.d_model) for name, stack in config.stacks.items()}
    if isinstance(config, EncoderDecoder) and config.source_vocab_size is not None:
        return config.source_vocab_size * widths["encoder"] + config.vocab_size * widths["decoder"]
    return config.vocab_size * next(iter(widths.values()))


def _positions(embedding: Embedding, d_model: int) -> int:
    """(length + offset) · w for learned positions, length · w for sinusoids kept as a frozen table, else none."""
    position, rows = embedding.position, 0
    if isinstance(position, Learned):
        rows = position.length + position.offset
    elif isinstance(position, Sinusoidal):
        rows = position.table or 0
    return rows * embedding.sum_width(d_model)


def _embedding_projection(embedding: Embedding, d_model: int) -> int:
    """w · d from a narrow table up to the stream, with or without a bias."""
    return _linear(embedding.factor.width, d_model, bias=embedding.factor.bias) if embedding.factor else 0


def _head_width(config: Config, head: Head) -> int:
    """What the output matrix reads: the token table's width if it is that table, else d."""
    *_, last = config.stacks.values()
    return last.embedding.table_width(config.d_model) if head.tied else config.d_model


def _head(config: Config) -> int:
    """V · w unless tied, and V for a learned bias."""
    head = config.head
    if not isinstance(head, Head):
        return 0
    matrix = 0 if head.tied else config.vocab_size * _head_width(config, head)
    return matrix + (config.vocab_size if head.bias == "learned" else 0)


def _head_transform(config: Config) -> int:
    """d · w and its norm, before the output matrix."""
    head = config.head
    if not isinstance(head, Head) or head.transform is None:
        return 0
    width = _head_width(config, head)
    return _linear(config.d_model, width, bias=head.transform.bias) + _norm(head.transform.norm, width)


# ---------------------------------------------------------------------------------------- layers


def _layers(name: str, stack: Stack, d_model: int) -> Iterator[LayerParams]:
    """One entry a layer. A relative bias has buckets · H; the first layer that uses a shared table holds it."""
    tables: set[tuple[RelativeBias, int]] = set()
    first_of: dict[int, int] = {}
    for index, block in enumerate(stack.blocks):
        attention = _attention(block.attention, d_model)
        position, heads = block.attention.position, block.attention.heads
        if isinstance(position, RelativeBias) and not (position.shared and (position, heads) in tables):
            attention += position.buckets * heads
            tables.add((position, heads))
        group = index if stack.groups is None else index * stack.groups // stack.layers
        first = first_of.setdefault(group, index)
        yield LayerParams(
            stack=name,
            attention=attention,
            cross=_heads(block.cross, d_model) if isinstance(block, CrossBlock) else 0,
            ffn=_ffn(block.ffn, d_model),
            ffn_active=_ffn_active(block.ffn, d_model),
            norm=_norm(stack.norm, d_model) * _norms_in(stack, first, block),
            same_as=None if first == index else first,
        )


def _norms_in(stack: Stack, layer: int, block: Block) -> int:
    """One norm a sublayer (pre, post, output), two for a sandwich; parallel attention and FFN may have one together."""
    sublayers = 3 if isinstance(block, CrossBlock) else 2
    match stack.placement:
        case Sandwich():
            return 2 * sublayers
        case Parallel(norms="one"):
            return sublayers - 1
        case Pre(bare_start=True) if layer == 0:
            return sublayers - 1
        case _:
            return sublayers


def _attention(attention: MultiHead | Latent, d_model: int) -> int:
    return _latent(attention, d_model) if isinstance(attention, Latent) else _heads(attention, d_model)


def _heads(attention: MultiHead | Cross, d_model: int) -> int:
    """q and o: d · H·d_head each; k and v: d · H_kv·d_head each; biases, gains of a qk-norm, a sink a head."""
    d_head = attention.head_width(d_model)
    q, kv = attention.heads * d_head, attention.n_kv_heads * d_head
    projections = sum(
        _linear(d_model, width, bias=p in attention.bias) for p, width in (("q", q), ("k", kv), ("v", kv))
    )
    out = _linear(q, d_model, bias="o" in attention.bias)
    sink = attention.heads if isinstance(attention, MultiHead) and attention.sink else 0
    return projections + out + _qk_norm(attention.qk_norm, attention, d_head) + sink


def _qk_norm(qk_norm: QKNorm | None, attention: Heads, d_head: int) -> int:
    """d_head for queries and for keys; times the heads where each has a gain of its own or all are one vector."""
    if qk_norm is None:
        return 0
    whole = qk_norm.over == "full" or qk_norm.gain_per_head
    vectors = attention.heads + attention.n_kv_heads if whole else 2
    return _norm(qk_norm.norm, vectors * d_head)


def _latent(attention: Latent, d_model: int) -> int:
    """Queries d · r_q · H·(nope + rope) through their latent, or straight; keys and values d · (r_kv + rope) down and
    r_kv · H·(nope + value) up; out H·value · d; a gain a dimension of each latent."""
    heads, bias = attention.heads, attention.bias
    q_width = heads * (attention.d_nope + attention.d_rope)
    if attention.q_rank is None:
        queries = _linear(d_model, q_width, bias=False)
    else:
        down = _linear(d_model, attention.q_rank, bias=bias) + _norm(attention.norm, attention.q_rank)
        queries = down + _linear(attention.q_rank, q_width, bias=False)
    down = _linear(d_model, attention.kv_rank + attention.d_rope, bias=bias) + _norm(attention.norm, attention.kv_rank)
    up = _linear(attention.kv_rank, heads * (attention.d_nope + attention.d_value), bias=False)
    return queries + down + up + _linear(heads * attention.d_value, d_model, bias=bias)


def _ffn(ffn: FFN, d_model: int) -> int:
    """Up and down: 2 · d · h; with a gate: 3 · d · h; a mixture: the router, every expert and the shared one."""
    if isinstance(ffn, Moe):
        return _routing_and_shared(ffn, d_model) + ffn.experts * _ffn(ffn.expert, d_model)
    hidden = ffn.hidden_width(d_model)
    inputs = 1 if isinstance(ffn, Mlp) else 2
    return inputs * _linear(d_model, hidden, bias=ffn.bias) + _linear(hidden, d_model, bias=ffn.bias)


def _ffn_active(ffn: FFN, d_model: int) -> int:
    """The same with top-k experts."""
    if isinstance(ffn, Moe):
        return _routing_and_shared(ffn, d_model) + ffn.router.top_k * _ffn(ffn.expert, d_model)
    return _ffn(ffn, d_model)


def _routing_and_shared(moe: Moe, d_model: int) -> int:
    """d · E for the router (its selection bias is a buffer), and the expert that every token passes."""
    router = _linear(d_model, moe.experts, bias=moe.router.bias)
    gate = d_model if moe.shared_gate else 0
    return router + gate + (_ffn(moe.shared, d_model) if moe.shared is not None else 0)
