"""The model on sizes: embedding, blocks, final norm, head."""

from cutaway.config.embedding import Embedding, Head
from cutaway.config.positions import Learned, Sinusoidal
from cutaway.config.stack import Block
from cutaway.config.transformer import Config, Encoder, EncoderDecoder
from cutaway.size.walk.attention import Scene
from cutaway.size.walk.block import block
from cutaway.size.walk.pieces import activate, dropout, norm
from cutaway.size.walk.scenes import Scenes
from cutaway.size.walk.storage import Key, Tensor, Weight
from cutaway.size.walk.tape import Tape


def stream(
    tape: Tape,
    config: Config,
    batch: int,
    length: int,
    source: int,
    *,
    past: int = 0,
    serving: bool = False,
    source_read: bool = False,
) -> Tensor:
    memory = None
    if isinstance(config, EncoderDecoder):
        if source_read:
            memory = Tensor((batch, source, config.d_model), 0, tape.new((0,), 0).storage, None)
        else:
            memory = stack(tape, config, "encoder", batch, source)
    name = "encoder" if isinstance(config, Encoder) else "decoder"
    x = stack(
        tape, config, name, batch, length, memory=memory, past=past, cached=serving or past > 0, source_read=source_read
    )
    if serving:
        x = Tensor((batch, 1, config.d_model), x.dtype, x.storage, x.node)
    return x


def logits(tape: Tape, x: Tensor, config: Config) -> Tensor:
    """A logit for each token of the vocabulary, where there is a head."""
    tape.part = "logits"
    return head(tape, x, config) if isinstance(config.head, Head) else x


def stack(
    tape: Tape,
    config: Config,
    name: str,
    batch: int,
    length: int,
    *,
    memory: Tensor | None = None,
    past: int = 0,
    cached: bool = False,
    source_read: bool = False,
) -> Tensor:
    """Embedding, blocks, final norm."""
    tower, d_model = config.stacks[name], config.d_model
    tape.part = "embedding"
    x = embed(tape, config, tower.embedding, name, batch, length)
    scenes = Scenes(
        tape, tower, d_model, causal=name == "decoder", length=length, past=past, cached=cached, source_read=source_read
    )
    for index, each in enumerate(tower.blocks):
        scene = scenes.of(index, memory)
        owner = index if tower.groups is None else index * tower.groups // tower.layers
        key: Key = (name, owner)
        first = owner == 0

        def run(x: Tensor, each: Block = each, scene: Scene = scene, key: Key = key, first: bool = first) -> Tensor:
            return block(tape, x, each, tower, scene, key, d_model, first=first)

        x = tape.run(run, x, key)
    tape.part = "norms"
    if tower.placement.final_norm:
        x = norm(tape, x, tower.norm, (name, "final_norm"))
    return dropout(tape, x, tower.final_dropout)


def embed(tape: Tape, config: Config, embedding: Embedding, name: str, batch: int, length: int) -> Tensor:
    d_model, dtype = config.d_model, tape.setting.weights
    own = config.source_vocab_size if isinstance(config, EncoderDecoder) and name == "encoder" else None
    width, rows = embedding.table_width(d_model), own or config.vocab_size
    key: Key = ("source tokens",) if own else ("tokens",)
    tokens = tape.new((batch, length), 8)
    x = tape.op((batch, length, width), dtype, saves=[tokens], weights=[Weight(key, (rows, width))])
    if tape.setting.tensor > 1:  # rows of others' tokens are zeros
        x = tape.summed(tape.op(x.shape, x.dtype, [x], saves=[tape.new((batch, length), 1)]))
    if embedding.scale_factor(d_model) != 1.0:
        x = tape.op(x.shape, x.dtype, [x])
    factor = embedding.factor
    if factor is not None and factor.positions == "wide":
        x = tape.linear(x, d_model, (name, "project"), bias=factor.bias, part="embedding")
    wide = x.shape[-1]
    match embedding.position:
        case Learned(length=limit, offset=offset):
            table = Weight((name, "positions"), (limit + offset, wide))
            place = tape.new((1, length), 8)
            added = tape.op((1, length, wide), dtype, saves=[place], weights=[table])
            x = tape.op(x.shape, x.dtype, [x, tape.cast(added, x.dtype)], passes=True)
        case Sinusoidal():
            x = tape.op(x.shape, x.dtype, [x], passes=True)
    if embedding.types:
        table = Weight((name, "types"), (embedding.types, wide))
        x = tape.op(x.shape, dtype, [x], weights=[table], passes=x.dtype == dtype)
    x = dropout(tape, norm(tape, x, embedding.norm, (name, "embedding_norm")), embedding.dropout)
    if factor is not None and factor.positions == "narrow":
        x = tape.linear(x, d_model, (name, "project"), bias=factor.bias, part="embedding")
    return tape.cast(x, tape.setting.stream) if tape.setting.narrow else x


def head(tape: Tape, x: Tensor, config: Config) -> Tensor:
    """Through the transform, if there is one, to a logit for each token of the vocabulary."""
    config_head = config.head
    assert isinstance(config_head, Head)
    transform = config_head.transform
    if transform is not None:
        *_, tower = config.stacks.values()
        width = tower.embedding.table_width(config.d_model) if config_head.tied else config.d_model
        x = tape.linear(x, width, ("head", "transform"), bias=transform.bias, part="head")
        x = norm(tape, activate(tape, x, transform.activation), transform.norm, ("head", "norm"))
    key: Key = ("tokens",) if config_head.tied else ("head",)
    logits = tape.linear(tape.given(x), config.vocab_size, key, bias=config_head.bias == "learned", part="head")
    if config_head.scale != 1.0:
        logits = tape.op(logits.shape, logits.dtype, [logits])
    if config_head.softcap is not None:
        logits = tape.op(logits.shape, logits.dtype, [logits])
        logits = tape.op(logits.shape, logits.dtype, [logits], saves_result=True)
        logits = tape.op(logits.shape, logits.dtype, [logits])
    return logits
