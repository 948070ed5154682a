"""Sites of cutaway models."""

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from cutaway.lens.sites import Site, SiteMap, attention_module, get_blocks
from cutaway.model import Transformer
from cutaway.model.attention import MultiHead
from cutaway.model.block import Block, Branch
from cutaway.model.head import LMHead
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.parallel.process_group import check_not_split
from cutaway.model.stack import Stack


def cutaway_sites(model: Transformer) -> SiteMap:
    check_not_split(model, "a trace or an edit")
    stacks = model.stacks
    sites: list[Site] = []
    for name, stack in stacks.items():
        sites += _stack_sites(stack, f"{name}." if len(stacks) > 1 else "", model.config.d_model)
    head, unavailable = getattr(model, "head", None), {}
    if isinstance(head, LMHead):
        sites.append(Site("logits", "BTV", head, axis_sizes=(("V", _weight(head.matrix).shape[0]),)))
    elif head is not None:
        unavailable["logits"] = f"the model has a {type(head).__name__} and no language modeling head"
    return SiteMap(sites, unavailable)


def _stack_sites(stack: Stack, prefix: str, d_model: int) -> Iterator[Site]:
    resid = partial(Site, axes="BTd", axis_sizes=(("d", d_model),), stack=stack)
    yield resid(f"{prefix}embed", module=stack.embed)
    for layer, block in enumerate(get_blocks(stack)):
        name, site = f"{prefix}blocks.{layer}", partial(resid, layer=layer)
        yield site(f"{name}.resid_pre", module=block, kind="in")
        yield from _attention_sites(f"{name}.attn", block.attn, site)
        # These sites are the outputs of the norm between two sublayers, which is an Identity unless the block is
        # post-norm. An edit there changes the residual stream itself, not only the input of the next sublayer.
        if isinstance(block, Block):
            if block.cross is not None:
                yield site(f"{name}.cross.resid_pre", module=block.norm_after_attn)
                yield from _attention_sites(f"{name}.cross", block.cross, site)
            yield site(f"{name}.resid_mid", module=block.norm_after_cross or block.norm_after_attn)
        yield from _ffn_sites(f"{name}.ffn", block.ffn, site)
        yield site(f"{name}.resid_post", module=block)
    yield resid(f"{prefix}final_norm", module=stack.final_norm)


def _attention_sites(prefix: str, branch: Branch, site: partial[Site]) -> Iterator[Site]:
    """Yield the sites of an attention sublayer. `site` builds a `Site` with the axes of the residual stream."""
    f = attention_module(branch)
    if isinstance(f, MultiHead):
        kv_heads, d_head, d_value = f.kv_heads, f.d_head, f.d_head
    else:
        kv_heads, d_head, d_value = f.heads, f.d_nope + f.d_rope, f.d_value
    sizes = (("H", f.heads), ("G", kv_heads), ("D", d_head), ("E", d_value))
    head_site = partial(site, module=f.kernel, axis_sizes=sizes)
    yield site(f"{prefix}.in", module=f, kind="in")
    for index, (letter, axes) in enumerate((("q", "BTHD"), ("k", "BSGD"), ("v", "BSGE"))):
        yield head_site(f"{prefix}.{letter}", axes=axes, kind="in", arg_index=index)
    yield head_site(f"{prefix}.scores", axes="BHTS", kind="scores")
    yield head_site(f"{prefix}.pattern", axes="BHTS", kind="pattern")
    yield head_site(f"{prefix}.z", axes="BTHE")
    yield site(f"{prefix}.out", module=branch)


def _ffn_sites(prefix: str, branch: Branch, site: partial[Site]) -> Iterator[Site]:
    f, path = branch.f, prefix
    dense: nn.Module | None = f
    yield site(f"{prefix}.in", module=f, kind="in")
    if isinstance(f, MixtureOfExperts):
        yield site(f"{prefix}.router", module=f.router, axes="NK", axis_sizes=(("K", f.router.top_k),))
        dense, path = f.shared, f"{prefix}.shared"
    if dense is not None:
        down = dense.get_submodule("down")
        yield site(f"{path}.hidden", module=down, kind="in", axes="BTh", axis_sizes=(("h", _weight(down).shape[-1]),))
    yield site(f"{prefix}.out", module=branch)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
