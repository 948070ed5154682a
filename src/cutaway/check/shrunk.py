"""A smaller model of the same structure, for one that is too large to be asked in seconds."""

from typing import Any

from cutaway.config import Config, Heads, Latent, Moe

WIDTH, HEADS, GROUPS, WORDS, FACTOR = 256, 4, 2, 4096, 64
"""Of the smaller model, at most."""


def shrunk(config: Config) -> Config:
    """Fewer layers (each kind that there is, and two at least), a narrower stream, fewer heads and words. Widths of
    heads, positions, norms, windows and experts stay, for they are what goes wrong."""
    width = min(config.d_model, WIDTH)
    changes: dict[str, Any] = {"d_model": width, "vocab_size": min(config.vocab_size, WORDS)}
    sources = getattr(config, "source_vocab_size", None)
    if sources is not None:
        changes["source_vocab_size"] = min(sources, WORDS)
    for name, stack in config.stacks.items():
        layers = min(stack.layers, len(stack.lead) + max(2, len(stack.block)))
        factor = stack.embedding.factor
        embedding = stack.embedding
        if factor is not None:
            embedding = embedding.replace(factor=factor.replace(width=min(factor.width, FACTOR)))
        changes[name] = stack.replace(
            layers=layers,
            lead=tuple(smaller(block, config.d_model, width) for block in stack.lead),
            block=tuple(smaller(block, config.d_model, width) for block in stack.block),
            embedding=embedding,
            groups=None if stack.groups is None else min(stack.groups, layers),
        )
    return config.replace(**changes)


def smaller(block: Any, before: int, width: int) -> Any:
    """A block for a narrower stream."""
    changes = {"attention": fewer(block.attention, before), "ffn": thinner(block.ffn, before, width)}
    if hasattr(block, "cross"):
        changes["cross"] = fewer(block.cross, before)
    return block.replace(**changes)


def fewer(attention: Any, before: int) -> Any:
    """Fewer heads, each as wide as before, in groups as before: one for all, one for some, or one for each."""
    if isinstance(attention, Latent):
        return attention.replace(heads=min(attention.heads, HEADS))
    assert isinstance(attention, Heads)
    kv = attention.n_kv_heads
    heads = min(attention.heads, HEADS)
    groups = heads if kv == attention.heads else min(kv, GROUPS)
    return attention.replace(
        heads=max(heads, groups),
        kv_heads=None if attention.kv_heads is None else groups,
        d_head=attention.head_width(before),
    )


def thinner(ffn: Any, before: int, width: int) -> Any:
    """Hidden widths in proportion."""
    if isinstance(ffn, Moe):
        shared = None if ffn.shared is None else thinner(ffn.shared, before, width)
        return ffn.replace(expert=thinner(ffn.expert, before, width), shared=shared)
    if ffn.hidden is None:
        return ffn
    return ffn.replace(hidden=max(16, ffn.hidden * width // before // 8 * 8))
