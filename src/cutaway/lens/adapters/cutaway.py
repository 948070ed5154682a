"""Sites of cutaway models."""

from collections.abc import Iterator
from typing import Any

from cutaway.lens.sites import Site, SiteMap
from cutaway.model import Transformer
from cutaway.model.attention import LatentAttention
from cutaway.model.block import Block
from cutaway.model.stack import Stack


def cutaway_sites(model: Transformer) -> SiteMap:
    stacks = model.stacks
    sites: list[Site] = []
    for name, stack in stacks.items():
        sites += _stack_sites(stack, f"{name}." if len(stacks) > 1 else "", model.config.d_model)
    head: Any = getattr(model, "head", None)
    if head is not None:
        sites.append(Site("logits", "BTV", head, axis_sizes=(("V", head.matrix.weight.shape[0]),)))
    return SiteMap(sites)


def _stack_sites(stack: Stack, prefix: str, d_model: int) -> Iterator[Site]:
    resid: Any = {"axes": "BTd", "axis_sizes": (("d", d_model),), "stack": stack}
    yield Site(f"{prefix}embed", module=stack.embed, **resid)
    block: Any
    for layer, block in enumerate(stack.blocks):
        name = f"{prefix}blocks.{layer}"
        block_resid: Any = {**resid, "layer": layer}
        yield Site(f"{name}.resid_pre", module=block, kind="in", **block_resid)
        yield from _attention_sites(f"{name}.attn", block.attn, block_resid)
        if getattr(block, "cross", None) is not None:
            yield Site(f"{name}.cross.resid_pre", module=block.norm_after_attn, **block_resid)
            yield from _attention_sites(f"{name}.cross", block.cross, block_resid)
        # The module between the sublayers (Identity unless post-norm): an edit changes the residual stream itself, not
        # only the FFN's input.
        if isinstance(block, Block):
            yield Site(f"{name}.resid_mid", module=block.norm_after_cross or block.norm_after_attn, **block_resid)
        yield from _ffn_sites(f"{name}.ffn", block.ffn, block_resid)
        yield Site(f"{name}.resid_post", module=block, **block_resid)
    yield Site(f"{prefix}final_norm", module=stack.final_norm, **resid)


def _attention_sites(prefix: str, branch: Any, site_kwargs: dict[str, Any]) -> Iterator[Site]:
    f, kernel = branch.f, branch.f.kernel
    latent = isinstance(f, LatentAttention)
    d_head = f.d_nope + f.d_rope if latent else f.d_head
    kv_heads, d_value = (f.heads, f.d_value) if latent else (f.kv_heads, f.d_head)
    head_kwargs: Any = site_kwargs | {
        "axis_sizes": (("H", f.heads), ("G", kv_heads), ("D", d_head), ("E", d_value)),
        "module": kernel,
    }
    yield Site(f"{prefix}.in", module=f, kind="in", **site_kwargs)
    for index, (letter, axes) in enumerate((("q", "BTHD"), ("k", "BSGD"), ("v", "BSGE"))):
        yield Site(f"{prefix}.{letter}", kind="in", arg_index=index, **head_kwargs | {"axes": axes})
    yield Site(f"{prefix}.scores", kind="scores", **head_kwargs | {"axes": "BHTS"})
    yield Site(f"{prefix}.pattern", kind="pattern", **head_kwargs | {"axes": "BHTS"})
    yield Site(f"{prefix}.z", **head_kwargs | {"axes": "BTHE"})
    yield Site(f"{prefix}.out", module=branch, **site_kwargs)


def _ffn_sites(prefix: str, branch: Any, site_kwargs: dict[str, Any]) -> Iterator[Site]:
    f = branch.f
    yield Site(f"{prefix}.in", module=f, kind="in", **site_kwargs)
    router, shared = getattr(f, "router", None), getattr(f, "shared", None)
    if router is not None:
        yield Site(
            f"{prefix}.router", module=router, **site_kwargs | {"axes": "NK", "axis_sizes": (("K", router.top_k),)}
        )
    for path, dense in ((f"{prefix}.shared", shared), (prefix, None if router is not None else f)):
        if dense is not None:
            d_ffn = dense.down.weight.shape[-1]
            hidden_kwargs: Any = site_kwargs | {"axes": "BTh", "axis_sizes": (("h", d_ffn),)}
            yield Site(f"{path}.hidden", module=dense.down, kind="in", **hidden_kwargs)
    yield Site(f"{prefix}.out", module=branch, **site_kwargs)
