"""Writes into docs/components/*.md which presets use the component, between <!-- made: presets --> and <!-- end -->.

python scripts/write_preset_tables.py

What a part's users have that differs (a theta, a window) is a row each; sizes of one model stand together.
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
"""A row of more presets than this says that it has the others."""
DescribeFn = Callable[[c.Config], str | None]
"""What a configuration has of a part, in a few words; None if it has none of it."""


def iter_blocks(config: c.Config) -> Iterator[c.Block]:
    for stack in config.stacks.values():
        yield from stack.blocks


def iter_attentions(config: c.Config) -> Iterator[c.MultiHead | c.LatentAttention]:
    return (block.attention for block in iter_blocks(config))


def iter_multi_head(config: c.Config) -> Iterator[c.MultiHead]:
    return (each for each in iter_attentions(config) if isinstance(each, c.MultiHead))


def last_stack(config: c.Config) -> c.Stack:
    """The last: the decoder, where there are two."""
    return list(config.stacks.values())[-1]


def join_unique(descriptions: Iterator[str]) -> str | None:
    """What the layers have, each once, in order."""
    return ", ".join(dict.fromkeys(descriptions)) or None


def describe_position(config_type: type, describe: Callable[..., str]) -> DescribeFn:
    return lambda config: join_unique(
        describe(each.position) for each in iter_attentions(config) if isinstance(each.position, config_type)
    )


def describe_stack_field(
    get_field: Callable[[c.Stack], object], config_type: type, describe: Callable[..., str]
) -> DescribeFn:
    def use(config: c.Config) -> str | None:
        return join_unique(
            describe(get_field(each)) for each in config.stacks.values() if isinstance(get_field(each), config_type)
        )

    return use


def describe_ffn(config_type: type | tuple[type, ...], describe: Callable[..., str]) -> DescribeFn:
    def use(config: c.Config) -> str | None:
        dense = [block.ffn for block in iter_blocks(config)]
        experts = [each.expert for each in dense if isinstance(each, c.Moe)]
        return join_unique(describe(each) for each in [*dense, *experts] if isinstance(each, config_type))

    return use


def describe_grouped_query(config: c.Config) -> str | None:
    found = (each for each in iter_multi_head(config) if each.num_kv_heads < each.heads)
    return join_unique(
        "multi-query" if each.num_kv_heads == 1 else f"{each.heads}:{each.num_kv_heads}" for each in found
    )


def describe_window(config: c.Config) -> str | None:
    widths = [each.window for each in iter_attentions(config)]
    if not any(widths):
        return None
    near = join_unique(f"{width:,}" for width in widths if width)
    return f"{near}, every layer" if all(widths) else f"{near}, in {sum(map(bool, widths))} of {len(widths)} layers"


def describe_head(config: c.Config) -> str | None:
    if not isinstance(config.head, c.LMHead):
        return None
    extra = [word for word, there in (("soft-cap", config.head.softcap), ("bias", config.head.bias != "none")) if there]
    extra += ["transform"] if config.head.transform else []
    extra += ["scale"] if config.head.scale != 1 else []
    return ", ".join(["tied" if config.head.tied else "own matrix", *extra])


def describe_embedding(config: c.Config) -> str | None:
    made = last_stack(config).embedding
    words = [f"scale {made.scale if isinstance(made.scale, float) else 'sqrt(d)'}"] if made.scale != 1 else []
    words += ["norm"] if not isinstance(made.norm, c.NoNorm) else []
    words += [f"narrow table of {made.factorization.width}"] if made.factorization else []
    words += [f"{made.token_types} type{'s' * (made.token_types > 1)}"] if made.token_types else []
    return ", ".join(words) or None


def describe_norm_placement(config: c.Config) -> str:
    place = last_stack(config).placement
    norms = {"one": ", one norm", "two": ", two norms"}[place.norms] if isinstance(place, c.ParallelResidual) else ""
    return place.kind + norms


def describe_softcap(config: c.Config) -> str | None:
    scores = join_unique(f"scores {each.softcap:g}" for each in iter_multi_head(config) if each.softcap)
    logits = config.head.softcap if isinstance(config.head, c.LMHead) else None
    return ", ".join([*([scores] if scores else []), *([f"logits {logits:g}"] if logits else [])]) or None


def describe_no_position(config: c.Config) -> str | None:
    """Attention without positions where the embedding has none either."""
    if not isinstance(last_stack(config).embedding.position, c.NoPosition):
        return None
    without = [isinstance(each.position, c.NoPosition) for each in iter_attentions(config)]
    return f"in {sum(without)} of {len(without)} layers" if any(without) else None


def describe_qk_norm(config: c.Config) -> str | None:
    made = (each.qk_norm for each in iter_multi_head(config) if each.qk_norm)
    return join_unique(
        f"{'all heads at once' if norm.over == 'full' else 'each head'}, {norm.norm.kind}" for norm in made
    )


def describe_rope_scaling(config: c.Config) -> str | None:
    ropes = (each.position for each in iter_attentions(config) if isinstance(each.position, c.Rope))
    return join_unique(rope.scaling.kind for rope in ropes if not isinstance(rope.scaling, c.NoScaling))


def describe_rope(config: c.Rope) -> str:
    words = [f"theta {config.theta:,.0f}", *(["part of the head"] if config.rotary_dim else [])]
    return ", ".join([*words, *(["interleaved"] if config.layout == "interleaved" else [])])


def describe_experts(config: c.Moe) -> str:
    return f"{config.router.top_k} of {config.experts}" + (", and one for all" if config.shared else "")


COMPONENTS: dict[str, DescribeFn] = {
    "embedding": describe_embedding,
    "sinusoidal": describe_stack_field(
        lambda stack: stack.embedding.position, c.SinusoidalPosition, lambda made: made.layout
    ),
    "learned": describe_stack_field(
        lambda stack: stack.embedding.position, c.LearnedPosition, lambda made: f"{made.length:,} positions"
    ),
    "rope": describe_position(c.Rope, describe_rope),
    "rope-scaling": describe_rope_scaling,
    "alibi": describe_position(c.Alibi, lambda made: f"max_bias {made.max_bias:g}"),
    "relative-bias": describe_position(c.RelativeBias, lambda made: f"{made.buckets} buckets to {made.max_distance}"),
    "no-positions": describe_no_position,
    "grouped-query": describe_grouped_query,
    "latent": lambda config: join_unique(
        f"kv_rank {a.kv_rank}" for a in iter_attentions(config) if isinstance(a, c.LatentAttention)
    ),
    "sliding-window": describe_window,
    "sinks": lambda config: join_unique("all layers" for each in iter_multi_head(config) if each.sink),
    "qk-norm": describe_qk_norm,
    "soft-cap": describe_softcap,
    "biases": lambda config: join_unique(", ".join(each.bias) for each in iter_multi_head(config) if each.bias),
    "cross-attention": lambda config: config.form if isinstance(config, c.EncoderDecoder) else None,
    "ffn": describe_ffn(c.Mlp, lambda made: made.activation),
    "gated-ffn": describe_ffn((c.Gated, c.ClampedSwiGLU), lambda made: getattr(made, "activation", "clamped silu")),
    "mixture-of-experts": describe_ffn(c.Moe, describe_experts),
    "layernorm": describe_stack_field(lambda stack: stack.norm, c.LayerNorm, lambda made: f"eps {made.eps:g}"),
    "rmsnorm": describe_stack_field(
        lambda stack: stack.norm, c.RMSNorm, lambda made: f"eps {made.eps:g}" + ", 1 + gain" * made.unit_offset
    ),
    "norm-placement": describe_norm_placement,
    "head": describe_head,
    "initialization": lambda config: config.init.kind,
}


def render_table(describe: DescribeFn) -> str:
    """Rows of what is had, with the models that have it; the most used first."""
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
    lines = [f"{count} of {len(published)} published presets.", "", "| which | presets |", "|---|---|"]
    for value, models in rows:
        shown = [f"`{model}`{' ' * any(sizes)}{' '.join(filter(None, sizes))}" for model, sizes in models.items()]
        many = sum(map(len, models.values())) > MAX_LISTED_PRESETS
        lines.append(f"| {value} | {'all others' if many else ' · '.join(shown)} |")
    return "\n".join(lines) + "\n"


def fill_page(page: str, name: str) -> str:
    made = render_table(COMPONENTS[name])
    return GENERATED_SECTION.sub(lambda found: f"{found[1]}{made}{found[2]}", page)


def main() -> None:
    for name in COMPONENTS:
        path = PAGES_DIR / f"{name}.md"
        path.write_text(fill_page(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
