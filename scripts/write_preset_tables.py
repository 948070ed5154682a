"""Write tables of presets to docs/components/*.md, between <!-- made: presets --> and <!-- end -->.

python scripts/write_preset_tables.py

Each table has one row per value of the component (a RoPE theta, a window), with the presets that have this value.
Presets of one model that differ only in size are grouped.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import cutaway as ct
from cutaway import config as c

PAGES_DIR = Path(__file__).parents[1] / "docs" / "components"
GENERATED_SECTION = re.compile(r"(<!-- made: presets -->\n).*?(<!-- end -->)", re.DOTALL)
SIZE_SUFFIX = re.compile(
    r"-(\d+(?:\.\d+)?[bm]\d?(?:-a\d+\w+)?|8x\d+b|small|base|medium|large|xl|xxl|xlarge|xxlarge|big)(-v2|-mlm|-v2-mlm)?$"
)
MAX_LISTED_PRESETS = 110
"""A row with more presets than this reads 'all others'."""
DescribeFn = Callable[[c.Config], str | None]
"""Returns a short description of a component in a configuration, or None if the configuration lacks it."""


def iter_blocks(config: c.Config) -> Iterator[c.Block]:
    for stack in config.stacks.values():
        yield from stack.blocks


def iter_attentions(config: c.Config) -> Iterator[c.MultiHead | c.LatentAttention]:
    return (block.attention for block in iter_blocks(config))


def iter_multi_head(config: c.Config) -> Iterator[c.MultiHead]:
    return (attention for attention in iter_attentions(config) if isinstance(attention, c.MultiHead))


def last_stack(config: c.Config) -> c.Stack:
    """The decoder, or the encoder of an encoder-only model."""
    return list(config.stacks.values())[-1]


def join_unique(descriptions: Iterator[str]) -> str | None:
    """Join the descriptions with commas, without repetitions. None if there are none."""
    return ", ".join(dict.fromkeys(descriptions)) or None


def describe_position(config_type: type, describe: Callable[..., str]) -> DescribeFn:
    return lambda config: join_unique(
        describe(attention.position)
        for attention in iter_attentions(config)
        if isinstance(attention.position, config_type)
    )


def describe_stack_field(
    get_field: Callable[[c.Stack], object], config_type: type, describe: Callable[..., str]
) -> DescribeFn:
    def describe_config(config: c.Config) -> str | None:
        return join_unique(
            describe(get_field(stack)) for stack in config.stacks.values() if isinstance(get_field(stack), config_type)
        )

    return describe_config


def describe_ffn(config_type: type | tuple[type, ...], describe: Callable[..., str]) -> DescribeFn:
    def describe_config(config: c.Config) -> str | None:
        dense = [block.ffn for block in iter_blocks(config)]
        experts = [ffn.expert for ffn in dense if isinstance(ffn, c.Moe)]
        return join_unique(describe(ffn) for ffn in [*dense, *experts] if isinstance(ffn, config_type))

    return describe_config


def describe_grouped_query(config: c.Config) -> str | None:
    grouped = (attention for attention in iter_multi_head(config) if attention.num_kv_heads < attention.heads)
    return join_unique(
        "multi-query" if attention.num_kv_heads == 1 else f"{attention.heads}:{attention.num_kv_heads}"
        for attention in grouped
    )


def describe_window(config: c.Config) -> str | None:
    widths = [attention.window for attention in iter_attentions(config)]
    if not any(widths):
        return None
    sizes = join_unique(f"{width:,}" for width in widths if width)
    return f"{sizes}, every layer" if all(widths) else f"{sizes}, in {sum(map(bool, widths))} of {len(widths)} layers"


def describe_head(config: c.Config) -> str | None:
    if not isinstance(config.head, c.LMHead):
        return None
    extra = [
        name for name, present in (("softcap", config.head.softcap), ("bias", config.head.bias != "none")) if present
    ]
    extra += ["transform"] if config.head.transform else []
    extra += ["scale"] if config.head.scale != 1 else []
    return ", ".join(["tied" if config.head.tied else "untied", *extra])


def describe_embedding(config: c.Config) -> str | None:
    embedding = last_stack(config).embedding
    features = (
        [f"scale {embedding.scale if isinstance(embedding.scale, float) else 'sqrt(d)'}"]
        if embedding.scale != 1
        else []
    )
    features += ["norm"] if not isinstance(embedding.norm, c.NoNorm) else []
    features += [f"factorized, width {embedding.factorization.width}"] if embedding.factorization else []
    features += (
        [f"{embedding.token_types} token type{'s' * (embedding.token_types > 1)}"] if embedding.token_types else []
    )
    return ", ".join(features) or None


def describe_norm_placement(config: c.Config) -> str:
    placement = last_stack(config).placement
    norms = (
        {"one": ", one norm", "two": ", two norms"}[placement.norms]
        if isinstance(placement, c.ParallelResidual)
        else ""
    )
    return placement.kind + norms


def describe_softcap(config: c.Config) -> str | None:
    scores = join_unique(f"scores {attention.softcap:g}" for attention in iter_multi_head(config) if attention.softcap)
    logits = config.head.softcap if isinstance(config.head, c.LMHead) else None
    return ", ".join([*([scores] if scores else []), *([f"logits {logits:g}"] if logits else [])]) or None


def describe_no_position(config: c.Config) -> str | None:
    """Count the layers whose attention has no position encoding. None if the embedding has one."""
    if not isinstance(last_stack(config).embedding.position, c.NoPosition):
        return None
    without = [isinstance(attention.position, c.NoPosition) for attention in iter_attentions(config)]
    return f"in {sum(without)} of {len(without)} layers" if any(without) else None


def describe_qk_norm(config: c.Config) -> str | None:
    qk_norms = (attention.qk_norm for attention in iter_multi_head(config) if attention.qk_norm)
    return join_unique(f"{'full width' if norm.over == 'full' else 'per head'}, {norm.norm.kind}" for norm in qk_norms)


def describe_rope_scaling(config: c.Config) -> str | None:
    ropes = (attention.position for attention in iter_attentions(config) if isinstance(attention.position, c.Rope))
    return join_unique(rope.scaling.kind for rope in ropes if not isinstance(rope.scaling, c.NoScaling))


def describe_rope(config: c.Rope) -> str:
    features = [f"theta {config.theta:,.0f}", *(["partial"] if config.rotary_dim else [])]
    return ", ".join([*features, *(["interleaved"] if config.layout == "interleaved" else [])])


def describe_experts(config: c.Moe) -> str:
    return f"{config.router.top_k} of {config.experts}" + (", shared expert" if config.shared else "")


COMPONENTS: dict[str, DescribeFn] = {
    "embedding": describe_embedding,
    "sinusoidal": describe_stack_field(
        lambda stack: stack.embedding.position, c.SinusoidalPosition, lambda position: position.layout
    ),
    "learned": describe_stack_field(
        lambda stack: stack.embedding.position, c.LearnedPosition, lambda position: f"{position.length:,} positions"
    ),
    "rope": describe_position(c.Rope, describe_rope),
    "rope-scaling": describe_rope_scaling,
    "alibi": describe_position(c.Alibi, lambda position: f"max_bias {position.max_bias:g}"),
    "relative-bias": describe_position(
        c.RelativeBias, lambda position: f"{position.buckets} buckets, max_distance {position.max_distance}"
    ),
    "disentangled": describe_position(
        c.Disentangled,
        lambda position: (
            f"{', '.join(position.pos_att_type)}, {position.buckets or position.max_distance} rows per direction"
        ),
    ),
    "no-positions": describe_no_position,
    "grouped-query": describe_grouped_query,
    "latent": lambda config: join_unique(
        f"kv_rank {a.kv_rank}" for a in iter_attentions(config) if isinstance(a, c.LatentAttention)
    ),
    "sliding-window": describe_window,
    "sinks": lambda config: join_unique("all layers" for attention in iter_multi_head(config) if attention.sink),
    "qk-norm": describe_qk_norm,
    "soft-cap": describe_softcap,
    "biases": lambda config: join_unique(
        ", ".join(attention.bias) for attention in iter_multi_head(config) if attention.bias
    ),
    "cross-attention": lambda config: config.form if isinstance(config, c.EncoderDecoder) else None,
    "ffn": describe_ffn(c.Mlp, lambda ffn: ffn.activation),
    "gated-ffn": describe_ffn((c.Gated, c.ClampedSwiGLU), lambda ffn: getattr(ffn, "activation", "clamped silu")),
    "mixture-of-experts": describe_ffn(c.Moe, describe_experts),
    "layernorm": describe_stack_field(lambda stack: stack.norm, c.LayerNorm, lambda norm: f"eps {norm.eps:g}"),
    "rmsnorm": describe_stack_field(
        lambda stack: stack.norm, c.RMSNorm, lambda norm: f"eps {norm.eps:g}" + ", 1 + gain" * norm.unit_offset
    ),
    "norm-placement": describe_norm_placement,
    "head": describe_head,
    "initialization": lambda config: config.init.kind,
}


def render_table(describe: DescribeFn) -> str:
    """Return a Markdown table of the component's values and the presets that have each, most frequent value first."""
    published = [name for name in ct.presets() if not name.startswith("tiny-")]
    by_value: dict[str, dict[str, list[str]]] = {}
    for name in published:
        value = describe(ct.config(name))
        if value is not None:
            size = None if name.startswith("olmoe") else SIZE_SUFFIX.search(name)
            model = name[: size.start()] if size else name
            by_value.setdefault(value, {}).setdefault(model, []).append(size[0][1:] if size else "")
    count = sum(len(sizes) for models in by_value.values() for sizes in models.values())
    rows = sorted(by_value.items(), key=lambda row: -sum(map(len, row[1].values())))
    lines = [f"{count} of {len(published)} published presets.", "", "| value | presets |", "|---|---|"]
    for value, models in rows:
        shown = [f"`{model}`{' ' * any(sizes)}{' '.join(filter(None, sizes))}" for model, sizes in models.items()]
        is_long = sum(map(len, models.values())) > MAX_LISTED_PRESETS
        lines.append(f"| {value} | {'all others' if is_long else ' · '.join(shown)} |")
    return "\n".join(lines) + "\n"


def fill_page(page: str, name: str) -> str:
    table = render_table(COMPONENTS[name])
    return GENERATED_SECTION.sub(lambda match: f"{match[1]}{table}{match[2]}", page)


def main() -> None:
    for name in COMPONENTS:
        path = PAGES_DIR / f"{name}.md"
        path.write_text(fill_page(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
