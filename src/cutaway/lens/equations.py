"""Equation of each site, including the norms, rotary embeddings, biases and scales of the model at hand."""

from torch import nn

from cutaway.lens.sites import Site, attention_module, get_blocks, is_resid_site, site_suffix
from cutaway.model import Transformer
from cutaway.model.attention import CrossAttention, LatentAttention, MultiHead
from cutaway.model.block import Block, Branch, ParallelBlock
from cutaway.model.ffn import GatedMLP
from cutaway.model.head import LMHead
from cutaway.model.moe import MixtureOfExperts
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack


def site_equation(model: Transformer, site: Site) -> str:
    """Return the equation of the value at a site, in textbook notation with x for the residual stream."""
    if site.stack is None:
        return _head_equation(model)
    if site.layer is None:
        is_embed = site.name.endswith("embed")
        return _embedding_equation(site.stack) if is_embed else _wrap_norm(site.stack.final_norm, "x")
    name, block = site_suffix(site.name), get_blocks(site.stack)[site.layer]
    if is_resid_site(name):
        return _resid_equation(name, block)
    sublayer, _, value = name.partition(".")
    branch: Branch = getattr(block, sublayer)
    if value == "in":
        equation = _wrap_norm(branch.norm_in, "x")
        return _wrap_norm(block.norm, equation) if isinstance(block, ParallelBlock) else equation
    if sublayer == "ffn":
        equation = _ffn_equation(branch.f, value)
    else:
        equation = _attention_equation(attention_module(branch), value, site.stack, site.layer)
    if value == "out":
        equation = _wrap_norm(branch.norm_out, equation)
        return equation if branch.scale == 1.0 else f"{branch.scale:.3g}·{equation}"
    return equation


def _resid_equation(name: str, block: Block | ParallelBlock) -> str:
    if name == "resid_pre":
        return "x"
    if isinstance(block, ParallelBlock):
        return "x + attn.out + ffn.out"
    writers = {"cross.resid_pre": "attn", "resid_mid": "attn" if block.cross is None else "cross", "resid_post": "ffn"}
    sublayer = writers[name]
    skip = "x" if block.skip_scale == 1.0 else f"{block.skip_scale:.3g}·x"
    skip = _wrap_norm(getattr(block, sublayer).norm_in, skip) if block.norm_skip else skip
    return _wrap_norm(getattr(block, f"norm_after_{sublayer}"), f"{skip} + {sublayer}.out")


def _wrap_norm(norm: nn.Module, inner: str) -> str:
    """Return `norm(inner)`, or `inner` if the norm is an Identity."""
    return inner if isinstance(norm, nn.Identity) else f"norm({inner})"


def _embedding_equation(stack: Stack) -> str:
    embed = stack.embed
    equation = "E[token]" if embed.scale == 1.0 else f"{embed.scale:.3g}·E[token]"
    if embed.project is not None and embed.project_before_positions:
        equation = f"W·{equation}"
    equation += "" if embed.position is None else " + position"
    equation += "" if embed.token_types is None else " + type"
    if embed.project is None or embed.project_before_positions:
        return _wrap_norm(embed.norm, equation)
    inner = equation if embed.project_before_norm else _wrap_norm(embed.norm, equation)
    projected = f"W·({inner})" if " + " in inner and not inner.startswith("norm") else f"W·{inner}"
    return _wrap_norm(embed.norm, projected) if embed.project_before_norm else projected


def _head_equation(model: Transformer) -> str:
    head = model.head
    assert isinstance(head, LMHead)
    stack = model.stacks.get("decoder") or model.stacks["encoder"]
    equation = "E·x" if head.matrix is stack.embed.token else "U·x"
    equation = equation if head.transform is None else equation.replace("x", "norm(act(W·x))")
    equation += "" if head.bias is None else " + b"
    if head.scale != 1.0:
        equation = f"{head.scale:.3g}·({equation})" if head.bias is not None else f"{head.scale:.3g}·{equation}"
    return equation if head.softcap is None else f"cap({equation})"


def _attention_equation(f: MultiHead | LatentAttention, value: str, stack: Stack, layer: int) -> str:
    cross = isinstance(f, CrossAttention)
    if value in ("q", "k", "v"):
        if isinstance(f, LatentAttention):
            return _latent_equation(f, value)
        return _projection_equation(f, value, with_rope=not cross and uses_rope(stack, layer))
    if value == "scores":
        equation = "q·kᵀ·scale" if f.kernel.softcap is None else "cap(q·kᵀ·scale)"
        position = None if cross else position_module(stack, layer)
        equation += "" if position is None or isinstance(position, Rope) else " + bias"
        return equation + (" + mask" if not cross and (stack.causal or stack.windows[layer] is not None) else "")
    if value == "pattern":
        return "softmax(scores)" if f.sink is None else "softmax(scores, sink)"
    return "pattern·v" if value == "z" else "Wo·z"


def _projection_equation(f: MultiHead, projection: str, *, with_rope: bool) -> str:
    equation = f"W{projection}·{'memory' if isinstance(f, CrossAttention) and projection != 'q' else 'in'}"
    if projection == "v":
        return equation
    equation = _wrap_norm(f.q_norm if projection == "q" else f.k_norm, equation)
    return f"rope({equation})" if with_rope else equation


def _latent_equation(f: LatentAttention, projection: str) -> str:
    """Return the equation of q, k or v in multi-head latent attention: c is the latent, kr the shared rotary key."""
    if projection == "q":
        return "Wq·in, rope" if isinstance(f.q, nn.Linear) else "Wuq·norm(Wdq·in), rope"
    return "Wuk·c, rope(kr)" if projection == "k" else "Wuv·c"


def position_module(stack: Stack, layer: int) -> nn.Module | None:
    return dict(stack.positions.items()).get(stack.layer_position_keys[layer])


def uses_rope(stack: Stack, layer: int) -> bool:
    return isinstance(position_module(stack, layer), Rope)


def _ffn_equation(f: nn.Module, value: str) -> str:
    dense: nn.Module | None = f
    if isinstance(f, MixtureOfExperts):
        dense = f.shared
        if value == "router":
            return f"top {f.router.top_k} of {'softmax' if f.router.use_softmax else 'sigmoid'}(Wr·in)"
        if value == "out":
            return "Σ weight·expert(in)" + ("" if f.shared is None else " + shared")
    if value == "out":
        return "W2·hidden"
    return "act(Wg·in) ⊙ W1·in" if isinstance(dense, GatedMLP) else "act(W1·in)"
