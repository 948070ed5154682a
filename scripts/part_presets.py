"""Writes into docs/parts/*.md which presets use the part, between <!-- made: presets --> and <!-- end -->.

python scripts/part_presets.py

What a part's users have that differs (a theta, a window) is a row each; sizes of one model stand together.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import cutaway as ct
from cutaway import config as c

FOLDER = Path(__file__).parents[1] / "docs" / "parts"
MADE = re.compile(r"(<!-- made: presets -->\n).*?(<!-- end -->)", re.DOTALL)
SIZE = re.compile(
    r"-(\d+(?:\.\d+)?[bm]\d?(?:-a\d+\w+)?|8x\d+b|small|base|medium|large|xl|xxl|xlarge|xxlarge|big)(-v2|-mlm|-v2-mlm)?$"
)
MANY = 110
"""A row of more presets than this says that it has the others."""
Use = Callable[[c.Config], str | None]
"""What a configuration has of a part, in a few words; None if it has none of it."""


def blocks(config: c.Config) -> Iterator[c.Block]:
    for stack in config.stacks.values():
        yield from stack.blocks


def attentions(config: c.Config) -> Iterator[c.MultiHead | c.Latent]:
    return (block.attention for block in blocks(config))


def heads(config: c.Config) -> Iterator[c.MultiHead]:
    return (each for each in attentions(config) if isinstance(each, c.MultiHead))


def stack(config: c.Config) -> c.Stack:
    """The last: the decoder, where there are two."""
    return list(config.stacks.values())[-1]


def first(found: Iterator[str]) -> str | None:
    """What the layers have, each once, in order."""
    return ", ".join(dict.fromkeys(found)) or None


def position(kind: type, told: Callable[..., str]) -> Use:
    return lambda config: first(told(each.position) for each in attentions(config) if isinstance(each.position, kind))


def of_stack(part: Callable[[c.Stack], object], kind: type, told: Callable[..., str]) -> Use:
    def use(config: c.Config) -> str | None:
        return first(told(part(each)) for each in config.stacks.values() if isinstance(part(each), kind))

    return use


def ffn(kind: type | tuple[type, ...], told: Callable[..., str]) -> Use:
    def use(config: c.Config) -> str | None:
        dense = [block.ffn for block in blocks(config)]
        experts = [each.expert for each in dense if isinstance(each, c.Moe)]
        return first(told(each) for each in [*dense, *experts] if isinstance(each, kind))

    return use


def grouped(config: c.Config) -> str | None:
    found = (each for each in heads(config) if each.n_kv_heads < each.heads)
    return first("multi-query" if each.n_kv_heads == 1 else f"{each.heads}:{each.n_kv_heads}" for each in found)


def window(config: c.Config) -> str | None:
    widths = [each.window for each in attentions(config)]
    if not any(widths):
        return None
    near = first(f"{width:,}" for width in widths if width)
    return f"{near}, every layer" if all(widths) else f"{near}, in {sum(map(bool, widths))} of {len(widths)} layers"


def tied(config: c.Config) -> str | None:
    if not isinstance(config.head, c.Head):
        return None
    extra = [word for word, there in (("soft-cap", config.head.softcap), ("bias", config.head.bias != "none")) if there]
    extra += ["transform"] if config.head.transform else []
    extra += ["scale"] if config.head.scale != 1 else []
    return ", ".join(["tied" if config.head.tied else "own matrix", *extra])


def embedding(config: c.Config) -> str | None:
    made = stack(config).embedding
    words = [f"scale {made.scale if isinstance(made.scale, float) else 'sqrt(d)'}"] if made.scale != 1 else []
    words += ["norm"] if not isinstance(made.norm, c.NoNorm) else []
    words += [f"narrow table of {made.factor.width}"] if made.factor else []
    words += [f"{made.types} type{'s' * (made.types > 1)}"] if made.types else []
    return ", ".join(words) or None


def placed(config: c.Config) -> str:
    place = stack(config).placement
    norms = {"one": ", one norm", "two": ", two norms"}[place.norms] if isinstance(place, c.Parallel) else ""
    return place.kind + norms


def caps(config: c.Config) -> str | None:
    scores = first(f"scores {each.softcap:g}" for each in heads(config) if each.softcap)
    logits = config.head.softcap if isinstance(config.head, c.Head) else None
    return ", ".join([*([scores] if scores else []), *([f"logits {logits:g}"] if logits else [])]) or None


def no_position(config: c.Config) -> str | None:
    """Attention without positions where the embedding has none either."""
    if not isinstance(stack(config).embedding.position, c.NoPosition):
        return None
    without = [isinstance(each.position, c.NoPosition) for each in attentions(config)]
    return f"in {sum(without)} of {len(without)} layers" if any(without) else None


def qk_norm(config: c.Config) -> str | None:
    made = (each.qk_norm for each in heads(config) if each.qk_norm)
    return first(f"{'all heads at once' if norm.over == 'full' else 'each head'}, {norm.norm.kind}" for norm in made)


def scaling(config: c.Config) -> str | None:
    ropes = (each.position for each in attentions(config) if isinstance(each.position, c.Rope))
    return first(rope.scaling.kind for rope in ropes if not isinstance(rope.scaling, c.NoScaling))


def rope(made: c.Rope) -> str:
    words = [f"theta {made.theta:,.0f}", *(["part of the head"] if made.width else [])]
    return ", ".join([*words, *(["interleaved"] if made.layout == "interleaved" else [])])


def experts(made: c.Moe) -> str:
    return f"{made.router.top_k} of {made.experts}" + (", and one for all" if made.shared else "")


USES: dict[str, Use] = {
    "embedding": embedding,
    "sinusoidal": of_stack(lambda stack: stack.embedding.position, c.Sinusoidal, lambda made: made.layout),
    "learned": of_stack(lambda stack: stack.embedding.position, c.Learned, lambda made: f"{made.length:,} positions"),
    "rope": position(c.Rope, rope),
    "rope-scaling": scaling,
    "alibi": position(c.Alibi, lambda made: f"max_bias {made.max_bias:g}"),
    "relative-bias": position(c.RelativeBias, lambda made: f"{made.buckets} buckets to {made.max_distance}"),
    "no-positions": no_position,
    "grouped-query": grouped,
    "latent": lambda config: first(f"kv_rank {a.kv_rank}" for a in attentions(config) if isinstance(a, c.Latent)),
    "window": window,
    "sinks": lambda config: first("all layers" for each in heads(config) if each.sink),
    "qk-norm": qk_norm,
    "soft-cap": caps,
    "biases": lambda config: first(", ".join(each.bias) for each in heads(config) if each.bias),
    "cross-attention": lambda config: config.form if isinstance(config, c.EncoderDecoder) else None,
    "ffn": ffn(c.Mlp, lambda made: made.activation),
    "gated-ffn": ffn((c.Gated, c.ClampedSwiGLU), lambda made: getattr(made, "activation", "clamped silu")),
    "mixture-of-experts": ffn(c.Moe, experts),
    "layernorm": of_stack(lambda stack: stack.norm, c.LayerNorm, lambda made: f"eps {made.eps:g}"),
    "rmsnorm": of_stack(
        lambda stack: stack.norm, c.RMSNorm, lambda made: f"eps {made.eps:g}" + ", 1 + gain" * made.unit_offset
    ),
    "placement": placed,
    "head": tied,
    "initialisation": lambda config: config.init.kind,
}


def table(use: Use) -> str:
    """Rows of what is had, with the models that have it; the most used first."""
    published = [name for name in ct.presets() if not name.startswith("tiny-")]
    by_value: dict[str, dict[str, list[str]]] = {}
    for name in published:
        value = use(ct.config(name))
        if value is not None:
            size = None if name.startswith("olmoe") else SIZE.search(name)
            model = name[: size.start()] if size else name
            by_value.setdefault(value, {}).setdefault(model, []).append(size[0][1:] if size else "")
    count = sum(len(sizes) for models in by_value.values() for sizes in models.values())
    rows = sorted(by_value.items(), key=lambda row: -sum(map(len, row[1].values())))
    lines = [f"{count} of {len(published)} published presets.", "", "| which | presets |", "|---|---|"]
    for value, models in rows:
        shown = [f"`{model}`{' ' * any(sizes)}{' '.join(filter(None, sizes))}" for model, sizes in models.items()]
        many = sum(map(len, models.values())) > MANY
        lines.append(f"| {value} | {'all others' if many else ' · '.join(shown)} |")
    return "\n".join(lines) + "\n"


def written(page: str, name: str) -> str:
    made = table(USES[name])
    return MADE.sub(lambda found: f"{found[1]}{made}{found[2]}", page)


def main() -> None:
    for name in USES:
        path = FOLDER / f"{name}.md"
        path.write_text(written(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
