"""Sites of a model of cutaway's own: what its modules are given and give back, by name."""

from collections.abc import Iterator
from typing import Any

from cutaway.lens.sites import Site, SiteMap
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention
from cutaway.model.block import Block
from cutaway.model.stack import Stack


def cutaway_sites(model: Transformer) -> SiteMap:
    stacks = model.stacks
    found: list[Site] = []
    for name, stack in stacks.items():
        found += _stack_sites(stack, f"{name}." if len(stacks) > 1 else "", model.config.d_model)
    head: Any = getattr(model, "head", None)
    if head is not None:
        found.append(Site("logits", "BTV", head, axis_sizes=(("V", head.matrix.weight.shape[0]),)))
    return SiteMap(found)


def _stack_sites(stack: Stack, prefix: str, d_model: int) -> Iterator[Site]:
    stream: Any = {"axes": "BTd", "axis_sizes": (("d", d_model),), "stack": stack}
    yield Site(f"{prefix}embed", module=stack.embed, **stream)
    block: Any
    for layer, block in enumerate(stack.blocks):
        here = f"{prefix}blocks.{layer}"
        at: Any = {**stream, "layer": layer}
        yield Site(f"{here}.resid_pre", module=block, kind="in", **at)
        yield from _attention_sites(f"{here}.attn", block.attn, at)
        if getattr(block, "cross", None) is not None:
            yield Site(f"{here}.cross.resid_pre", module=block.norm_after_attn, **at)
            yield from _attention_sites(f"{here}.cross", block.cross, at)
        if isinstance(block, Block):  # where the stream itself can be changed, not only what the FFN reads of it
            yield Site(f"{here}.resid_mid", module=block.norm_after_cross or block.norm_after_attn, **at)
        yield from _ffn_sites(f"{here}.ffn", block.ffn, at)
        yield Site(f"{here}.resid_post", module=block, **at)
    yield Site(f"{prefix}final_norm", module=stack.final_norm, **stream)


def _attention_sites(prefix: str, branch: Any, site_kwargs: dict[str, Any]) -> Iterator[Site]:
    f, kernel = branch.f, branch.f.kernel
    latent = isinstance(f, LatentAttention)
    d_head = f.d_nope + f.d_rope if latent else f.d_head
    groups, value = (f.heads, f.d_value) if latent else (f.kv_heads, f.d_head)
    of_heads: Any = site_kwargs | {
        "axis_sizes": (("H", f.heads), ("G", groups), ("D", d_head), ("E", value)),
        "module": kernel,
    }
    yield Site(f"{prefix}.in", module=f, kind="in", **site_kwargs)
    for index, (letter, axes) in enumerate((("q", "BTHD"), ("k", "BSGD"), ("v", "BSGE"))):
        yield Site(f"{prefix}.{letter}", kind="in", arg_index=index, **of_heads | {"axes": axes})
    yield Site(f"{prefix}.scores", kind="scores", **of_heads | {"axes": "BHTS"})
    yield Site(f"{prefix}.pattern", kind="pattern", **of_heads | {"axes": "BHTS"})
    yield Site(f"{prefix}.z", **of_heads | {"axes": "BTHE"})
    yield Site(f"{prefix}.out", module=branch, **site_kwargs)


def _ffn_sites(prefix: str, branch: Any, site_kwargs: dict[str, Any]) -> Iterator[Site]:
    f = branch.f
    yield Site(f"{prefix}.in", module=f, kind="in", **site_kwargs)
    router, shared = getattr(f, "router", None), getattr(f, "shared", None)
    if router is not None:
        yield Site(
            f"{prefix}.router", module=router, **site_kwargs | {"axes": "NK", "axis_sizes": (("K", router.top_k),)}
        )
    for where, dense in ((f"{prefix}.shared", shared), (prefix, None if router is not None else f)):
        if dense is not None:
            width = dense.down.weight.shape[-1]
            hidden: Any = site_kwargs | {"axes": "BTh", "axis_sizes": (("h", width),)}
            yield Site(f"{where}.hidden", module=dense.down, kind="in", **hidden)
    yield Site(f"{prefix}.out", module=branch, **site_kwargs)
