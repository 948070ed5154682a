"""Hypothesis strategies for small random configurations; models, tokens and masks for them."""

import math
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cutaway import config as c
from cutaway.model import Transformer, build

DrawFn = Any
SEQ_LEN = 12
"""Sequence length of tests with random configurations."""

DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 2**16)


def optional(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | value


def norms(*, allow_none: bool = False) -> st.SearchStrategy[Any]:
    layer = st.builds(c.LayerNorm, eps=st.sampled_from([1e-5, 1e-3]), gain=st.booleans(), bias=st.booleans())
    rms = st.builds(c.RMSNorm, eps=st.sampled_from([1e-6, 1e-3]), unit_offset=st.booleans())
    return layer | rms | st.just(c.NoNorm()) if allow_none else layer | rms


@st.composite
def ropes(draw: DrawFn, d_head: int) -> c.Rope:
    width = draw(st.sampled_from([None, *range(2, d_head + 1, 2)]))
    pairs = (width or d_head) // 2
    factors = st.lists(st.floats(1.0, 8.0), min_size=pairs, max_size=pairs).map(tuple)
    scalings = [
        st.just(c.NoScaling()),
        st.builds(c.LinearScaling, factor=st.floats(1.0, 8.0)),
        st.builds(
            c.Yarn,
            factor=st.floats(1.0, 40.0),
            original_length=st.sampled_from([4, 16, 64]),
            truncate=st.booleans(),
            attention_factor=optional(st.floats(0.5, 1.5)),
        ),
        st.builds(c.Llama3Scaling, original_length=st.sampled_from([4, 16, 64])),
        st.builds(
            c.LongRope,
            short_factors=factors,
            long_factors=factors,
            original_length=st.just(4 * SEQ_LEN),
            attention_factor=st.floats(0.5, 1.5),
        ),
    ]
    if pairs > 1:
        scalings.append(st.builds(c.DynamicNTK, factor=st.floats(1.0, 8.0), original_length=st.just(4 * SEQ_LEN)))
    return c.Rope(
        theta=draw(st.sampled_from([100.0, 10000.0, 1e6])),
        rotary_dim=width,
        layout=draw(st.sampled_from(["half", "interleaved"])),
        scaling=draw(st.one_of(scalings)),
    )


@st.composite
def head_fields(draw: DrawFn, d_model: int) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    d_head = draw(st.sampled_from([2, 4, 6, 8]))
    if d_model % heads == 0 and (d_model // heads) % 2 == 0 and draw(st.booleans()):
        d_head = None
    over = draw(st.sampled_from(["head", "full"]))
    # LayerNorm of two values is their sign, which is discontinuous: rounding would break every equivalence.
    has_two_dimensions = (d_head or d_model // heads) == 2
    norm = st.builds(c.RMSNorm, unit_offset=st.booleans()) if has_two_dimensions else norms()
    qk_norm = st.builds(
        c.QKNorm, norm=norm, over=st.just(over), gain_per_head=st.booleans() if over == "head" else st.just(False)
    )
    return {
        "heads": heads,
        "kv_heads": draw(st.sampled_from([None, *(k for k in range(1, heads + 1) if heads % k == 0)])),
        "d_head": d_head,
        "bias": tuple(sorted(draw(st.sets(st.sampled_from("qkvo"))))),
        "scale": draw(optional(st.floats(0.1, 1.0))),
        "softcap": draw(optional(st.sampled_from([2.0, 50.0]))),
        "qk_norm": draw(optional(qk_norm)),
        "clip_qkv": draw(optional(st.just(1.5))),
    }


@st.composite
def multi_head_attentions(draw: DrawFn, d_model: int, positions: tuple[str, ...]) -> c.MultiHead:
    fields = draw(head_fields(d_model))
    kind = draw(st.sampled_from(positions))
    position = {
        "none": lambda: c.NoPosition(),
        "rope": lambda: draw(ropes(fields["d_head"] or d_model // fields["heads"])),
        "alibi": lambda: c.Alibi(
            max_bias=draw(st.sampled_from([4.0, 8.0])),
            scale=draw(st.sampled_from([1.0, 0.5])),
            round_to_bf16=draw(st.booleans()),
        ),
        "relative-bias": lambda: c.RelativeBias(
            buckets=draw(st.sampled_from([6, 8])), max_distance=16, shared=draw(st.booleans())
        ),
        "disentangled": lambda: c.Disentangled(
            pos_att_type=draw(st.sampled_from([("c2p",), ("p2c",), ("c2p", "p2c")])),
            buckets=draw(st.sampled_from([None, 4, 6])),
            max_distance=draw(st.sampled_from([6, 16])),
            share_att_key=draw(st.booleans()),
            norm=draw(norms(allow_none=True)),
        ),
    }[kind]()
    return c.MultiHead(
        **fields, position=position, window=draw(optional(st.integers(1, SEQ_LEN))), sink=draw(st.booleans())
    )


@st.composite
def latent_attentions(draw: DrawFn) -> c.LatentAttention:
    return c.LatentAttention(
        heads=draw(st.integers(1, 3)),
        q_rank=draw(optional(st.integers(2, 6))),
        kv_rank=draw(st.integers(2, 6)),
        d_nope=draw(st.integers(2, 5)),
        d_rope=4,
        d_value=draw(st.integers(2, 5)),
        position=draw(ropes(4)).replace(rotary_dim=None, scaling=c.NoScaling()),
        bias=draw(st.booleans()),
        window=draw(optional(st.integers(1, SEQ_LEN))),
    )


def dense_ffns() -> st.SearchStrategy[Any]:
    hidden, act = (
        st.sampled_from([None, 5, 16]),
        st.sampled_from(["relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "relu2"]),
    )
    return st.one_of(
        st.builds(c.Mlp, hidden=hidden, activation=act, bias=st.booleans()),
        st.builds(
            c.Gated, hidden=hidden, activation=act | st.sampled_from(["sigmoid", "identity"]), bias=st.booleans()
        ),
        st.builds(c.ClampedSwiGLU, hidden=hidden, bias=st.booleans(), limit=st.sampled_from([1.0, 7.0])),
    )


@st.composite
def moes(draw: DrawFn) -> c.Moe:
    experts = draw(st.sampled_from([2, 4, 8]))
    groups = None
    if experts >= 4 and draw(st.booleans()):
        groups = c.ExpertGroups(
            num_groups=2, top_k=draw(st.integers(1, 2)), score=draw(st.sampled_from(["top2", "max"]))
        )
    router = c.Router(
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        top_k=draw(st.integers(1, 2)),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        bias=draw(st.booleans()),
        selection_bias=draw(st.booleans()),
        groups=groups,
    )
    shared = draw(optional(dense_ffns()))
    gate = shared is not None and draw(st.booleans())
    return c.Moe(experts=experts, router=router, expert=draw(dense_ffns()), shared=shared, shared_gate=gate)


@st.composite
def blocks(draw: DrawFn, d_model: int, positions: tuple[str, ...], *, cross: bool) -> c.Block:
    latent = "rope" in positions and draw(st.integers(0, 4)) == 0
    fields = {
        "attention": draw(latent_attentions() if latent else multi_head_attentions(d_model, positions)),
        "ffn": draw(st.one_of(dense_ffns(), dense_ffns(), moes())),
    }
    return c.CrossBlock(**fields, cross=c.Cross(**draw(head_fields(d_model)))) if cross else c.Block(**fields)


@st.composite
def embeddings(draw: DrawFn, d_model: int, positions: tuple[str, ...]) -> c.Embedding:
    learned = st.builds(c.LearnedPosition, length=st.just(4 * SEQ_LEN), offset=st.sampled_from([0, 2]))
    sinusoidal = st.builds(
        c.SinusoidalPosition,
        layout=st.sampled_from(["interleaved", "halves"]),
        endpoint=st.booleans(),
        offset=st.sampled_from([0, 2]),
    )
    choices = {"none": st.just(c.NoPosition()), "learned": learned, "sinusoidal": sinusoidal}
    factor = st.builds(
        c.FactorizedEmbedding,
        width=st.sampled_from([4, 6]),
        bias=st.booleans(),
        positions=st.sampled_from(["before_projection", "after_projection"]),
    ) | st.builds(c.FactorizedEmbedding, width=st.sampled_from([4, 6]), norm_after_projection=st.just(True))
    return c.Embedding(
        position=draw(st.one_of(choices[name] for name in positions)),
        scale=draw(st.sampled_from([1.0, "sqrt_d_model", 0.5])),
        token_types=draw(st.sampled_from([0, 0, 2])),
        norm=draw(norms(allow_none=True)),
        factorization=draw(st.none() | st.none() | factor),
    )


@st.composite
def stacks(
    draw: DrawFn,
    d_model: int,
    embedding_positions: tuple[str, ...],
    attention_positions: tuple[str, ...],
    *,
    cross: bool = False,
) -> c.Stack:
    pattern = tuple(draw(st.lists(blocks(d_model, attention_positions, cross=cross), min_size=1, max_size=2)))
    leading = tuple(draw(st.lists(blocks(d_model, attention_positions, cross=cross), max_size=1)))
    layers = len(leading) + len(pattern) + draw(st.integers(0, 1))
    shared_bias = all(getattr(block.attention.position, "shared", True) for block in pattern)
    groups = (
        draw(st.sampled_from([None, 1, 2]))
        if not leading and len(pattern) == 1 and layers > 1 and shared_bias
        else None
    )
    layers_per_group = draw(st.sampled_from([1, 2])) if groups == 1 else 1
    placements = [
        st.builds(
            c.PreNorm,
            skip_first_prenorm=st.booleans() if groups is None else st.just(False),
            norm_skip=st.sampled_from([False, False, True]),
        ),
        st.builds(c.PostNorm, skip_scale=st.sampled_from([1.0, 1.5])),
        st.just(c.SandwichNorm()),
        st.just(c.OutputNorm()),
    ]
    if not cross:
        placements.append(st.builds(c.ParallelResidual, norms=st.sampled_from(["one", "two"])))
    kind = c.CrossStack if cross else c.Stack
    return kind(
        layers=layers * layers_per_group,
        block=pattern,
        leading_blocks=leading,
        embedding=draw(embeddings(d_model, embedding_positions)),
        norm=draw(norms()),
        placement=draw(st.one_of(placements)),
        residual_scale=draw(st.sampled_from([1.0, 0.5])),
        layer_groups=groups,
        layers_per_group=layers_per_group,
    )


def has_additive_residual(stack: c.Stack) -> bool:
    """Whether blocks only add to the residual stream: not with post-norm or with a norm on the skip connection."""
    placement = stack.placement
    return not isinstance(placement, c.PostNorm) and not (isinstance(placement, c.PreNorm) and placement.norm_skip)


FORMS = ("decoder", "encoder", "encoder-decoder")
EMBEDDING_POSITIONS = ("none", "learned", "sinusoidal")
HEADS = ("lm", "task")
ATTENTION_POSITIONS = ("none", "rope", "alibi", "relative-bias", "disentangled")


def head_transforms() -> st.SearchStrategy[c.HeadTransform]:
    return st.builds(
        c.HeadTransform,
        activation=st.sampled_from(["gelu", "identity", "tanh"]),
        norm=norms(allow_none=True),
        bias=st.booleans(),
    )


def task_heads(form: str = "encoder") -> st.SearchStrategy[Any]:
    """Heads of tasks that a model of this form can have."""
    pooling = st.sampled_from(["first", "last", "mean"])
    classifier = {"transform": optional(head_transforms()), "bias": st.booleans()}
    num_labels = st.integers(1, 5)
    projection = st.builds(
        c.EmbeddingProjection,
        dim=st.integers(2, 9),
        activation=st.sampled_from(["identity", "tanh"]),
        bias=st.booleans(),
    )
    heads = {
        "sequence": st.builds(c.SequenceClassificationHead, num_labels=num_labels, pooling=pooling, **classifier),
        "token": st.builds(c.TokenClassificationHead, num_labels=num_labels, **classifier),
        "embedding": st.builds(
            c.EmbeddingHead, pooling=pooling | st.just("max"), projection=optional(projection), normalize=st.booleans()
        ),
        "choice": st.builds(c.MultipleChoiceHead, pooling=pooling, **classifier),
    }
    names = {"encoder": tuple(heads), "decoder": ("sequence", "token", "embedding"), "encoder-decoder": ("sequence",)}
    return st.one_of(heads[name] for name in names[form])


@st.composite
def configs(
    draw: DrawFn,
    forms: tuple[str, ...] = FORMS,
    embedding_positions: tuple[str, ...] = EMBEDDING_POSITIONS,
    attention_positions: tuple[str, ...] = ATTENTION_POSITIONS,
    heads: tuple[str, ...] = ("lm",),
) -> c.Config:
    """A random small configuration of the given forms, position kinds and heads ('lm' or 'task')."""
    form = draw(st.sampled_from(forms))
    d_model = draw(st.sampled_from([8, 12, 16]))
    vocab_size = draw(st.integers(7, 40))
    transform = head_transforms()
    if draw(st.sampled_from(heads)) == "task":
        config = draw(
            configs(forms=(form,), embedding_positions=embedding_positions, attention_positions=attention_positions)
        )
        return config.replace(head=draw(task_heads(form)))
    head = c.LMHead(
        tied=draw(st.booleans()),
        bias=draw(st.sampled_from(["none", "learned", "fixed"])),
        scale=draw(st.sampled_from([1.0, 0.25])),
        softcap=draw(optional(st.just(5.0))),
        transform=draw(optional(transform)),
    )
    common = {"vocab_size": vocab_size, "d_model": d_model}
    if form != "encoder-decoder":
        stack = draw(stacks(d_model, embedding_positions, attention_positions))
        if stack.embedding.factorization and head.transform is None:
            head = head.replace(tied=False)
        kind = c.Decoder if form == "decoder" else c.Encoder
        extra = {"pooler": draw(st.booleans())} if form == "encoder" else {}
        return kind(**common, **{form: stack}, head=head, **extra)
    encoder = draw(stacks(d_model, embedding_positions, attention_positions))
    decoder = draw(stacks(d_model, embedding_positions, attention_positions, cross=True))
    source_vocab_size = draw(optional(st.integers(7, 40)))
    if source_vocab_size is None:
        decoder = decoder.replace(embedding=decoder.embedding.replace(factorization=encoder.embedding.factorization))
    if decoder.embedding.factorization and head.transform is None:
        head = head.replace(tied=False)
    return c.EncoderDecoder(**common, encoder=encoder, decoder=decoder, head=head, source_vocab_size=source_vocab_size)


def draw_distinct_configs(count: int) -> list[c.Config]:
    """At most `count` different random configurations, the same ones in each run."""
    drawn: dict[str, c.Config] = {}

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(configs())
    def collect(config: c.Config) -> None:
        drawn[repr(config)] = config

    collect()
    return list(drawn.values())


@torch.no_grad()
def build_randomized_model(config: c.Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """Build a model with random parameters and buffers, so that each affects the output; activations are of order 1."""
    model = build(config, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name.endswith(("head.bias", "selection_bias"))
    }
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.ndim >= 2 and "norm" not in name:
            is_table = "embed" in name or "positions" in name
            tensor.copy_(noise * (1.0 if is_table else 1.0 / math.sqrt(tensor.shape[-1])))
        else:
            tensor.add_(noise.to(tensor.dtype) * 0.3)
    return model


def tolerance(dtype: torch.dtype, reference: torch.Tensor) -> float:
    """Absolute tolerance: 1e-5 in fp32 and 1e-10 in fp64, times max(1, largest absolute value)."""
    return (1e-5 if dtype == torch.float32 else 1e-10) * max(1.0, float(reference.abs().max()))


def random_tokens(config: c.Config, batch: int, length: int, seed: int, side: str = "target") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vocab = getattr(config, "source_vocab_size", None) if side == "source" else None
    return torch.randint(0, vocab or config.vocab_size, (batch, length), generator=generator)


def compute_logits(
    model: Transformer, config: c.Config, tokens: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Logits of `tokens`; an encoder-decoder gets a random padded source."""
    if config.form != "encoder-decoder":
        return model(tokens, mask, **kwargs)
    source = random_tokens(config, len(tokens), 5, 99, "source")
    source_mask = torch.ones_like(source, dtype=torch.bool)
    source_mask[-1, :2] = False
    source_is_cached = kwargs.get("cache") is not None and kwargs["cache"].memory_positions is not None
    if source_is_cached:
        return model(None, tokens, None, mask, **kwargs)
    return model(source, tokens, source_mask, mask, **kwargs)


def ragged_padding_mask(batch: int, length: int, side: str) -> torch.Tensor:
    """Mask with r padding tokens in row r."""
    order = torch.arange(length).expand(batch, length)
    padding = torch.arange(batch).unsqueeze(-1)
    return order >= padding if side == "left" else order < length - padding
