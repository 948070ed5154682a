"""Equation of each site, with the norms, rotary embeddings, biases and scales that the model has."""

from typing import Any

from torch import nn

from cutaway.lens.sites import Site, is_resid_site, site_suffix
from cutaway.model import Transformer
from cutaway.model.attention import CrossAttention, LatentAttention
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import GatedMLP
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack


def site_equation(model: Transformer, site: Site) -> str:
    """Return the equation of a site in textbook notation; x is the residual stream."""
    if site.stack is None:
        return _head_equation(model)
    if site.layer is None:
        final_norm: nn.Module = site.stack.final_norm
        return _embedding_equation(site.stack) if site.name.endswith("embed") else _wrap_norm("norm", final_norm, "x")
    name = site_suffix(site.name)
    block: Any = site.stack.blocks[site.layer]
    if is_resid_site(name):
        return _resid_equation(name, block)
    sublayer, _, value = name.partition(".")
    branch = getattr(block, sublayer)
    if value == "in":
        norm = block.norm if isinstance(block, ParallelBlock) else branch.norm_in
        return _wrap_norm("norm", norm, _wrap_norm("norm", branch.norm_in, "x") if norm is not branch.norm_in else "x")
    if sublayer == "ffn":
        equation = _ffn_equation(branch.f, value)
    else:
        equation = _attention_equation(branch.f, value, site.stack, site.layer)
    if value == "out":
        equation = _wrap_norm("norm", branch.norm_out, equation)
        return equation if branch.scale == 1.0 else f"{branch.scale:.3g}·{equation}"
    return equation


def _resid_equation(name: str, block: Any) -> str:
    if name == "resid_pre":
        return "x"
    if isinstance(block, ParallelBlock):
        return "x + attn.out + ffn.out"
    writers = {"cross.resid_pre": "attn", "resid_mid": "attn" if block.cross is None else "cross", "resid_post": "ffn"}
    sublayer = writers[name]
    skip = "x" if block.skip_scale == 1.0 else f"{block.skip_scale:.3g}·x"
    return _wrap_norm("norm", getattr(block, f"norm_after_{sublayer}"), f"{skip} + {sublayer}.out")


def _wrap_norm(name: str, module: nn.Module, inner: str) -> str:
    """Return `name(inner)`, or `inner` if the module is an Identity."""
    return inner if isinstance(module, nn.Identity) else f"{name}({inner})"


def _embedding_equation(stack: Stack) -> str:
    embed = stack.embed
    equation = "E[token]" if embed.scale == 1.0 else f"{embed.scale:.3g}·E[token]"
    if embed.project is not None and embed.project_before_positions:
        equation = f"W·{equation}"
    equation += "" if embed.position is None else " + position"
    equation += "" if embed.token_types is None else " + type"
    equation = _wrap_norm("norm", embed.norm, equation)
    factor = equation if equation.startswith("norm") or " + " not in equation else f"({equation})"
    return f"W·{factor}" if embed.project is not None and not embed.project_before_positions else equation


def _head_equation(model: Any) -> str:
    head = model.head
    equation = "E·x" if head.matrix is _token_embedding(model) else "U·x"
    equation = equation if head.transform is None else equation.replace("x", "norm(act(W·x))")
    equation += "" if head.bias is None else " + b"
    if head.scale != 1.0:
        equation = f"{head.scale:.3g}·({equation})" if head.bias is not None else f"{head.scale:.3g}·{equation}"
    return equation if head.softcap is None else f"cap({equation})"


def _token_embedding(model: Transformer) -> nn.Module:
    stack = model.stacks.get("decoder") or model.stacks["encoder"]
    return stack.embed.token


def _attention_equation(f: Any, value: str, stack: Stack, layer: int) -> str:
    cross, latent = isinstance(f, CrossAttention), isinstance(f, LatentAttention)
    if value in ("q", "k", "v"):
        return (
            _latent_equation(f, value)
            if latent
            else _projection_equation(f, value, with_rope=not cross and uses_rope(stack, layer))
        )
    if value == "scores":
        equation = "q·kᵀ·scale" if f.kernel.softcap is None else "cap(q·kᵀ·scale)"
        position = None if cross else position_module(stack, layer)
        equation += "" if position is None or isinstance(position, Rope) else " + bias"
        return equation + (" + mask" if not cross and (stack.causal or stack.windows[layer] is not None) else "")
    if value == "pattern":
        return "softmax(scores)" if f.sink is None else "softmax(scores, sink)"
    return "pattern·v" if value == "z" else "Wo·z"


def _projection_equation(f: Any, projection: str, *, with_rope: bool) -> str:
    equation = f"W{projection}·{'memory' if isinstance(f, CrossAttention) and projection != 'q' else 'in'}"
    if projection == "v":
        return equation
    equation = _wrap_norm("norm", f.q_norm if projection == "q" else f.k_norm, equation)
    return f"rope({equation})" if with_rope else equation


def _latent_equation(f: Any, projection: str) -> str:
    """Multi-head latent attention: c is the latent, kr the shared rotary key."""
    if projection == "q":
        return "Wq·in, rope" if isinstance(f.q, nn.Linear) else "Wuq·norm(Wdq·in), rope"
    return "Wuk·c, rope(kr)" if projection == "k" else "Wuv·c"


def position_module(stack: Stack, layer: int) -> nn.Module | None:
    return dict(stack.positions.items()).get(stack.layer_position_keys[layer])


def uses_rope(stack: Stack, layer: int) -> bool:
    return isinstance(position_module(stack, layer), Rope)


def _ffn_equation(f: Any, value: str) -> str:
    router: Any = getattr(f, "router", None)
    if value == "router":
        return f"top {router.top_k} of {'softmax' if router.use_softmax else 'sigmoid'}(Wr·in)"
    if value == "out" and router is not None:
        return "Σ weight·expert(in)" + ("" if getattr(f, "shared", None) is None else " + shared")
    if value == "out":
        return "W2·hidden"
    dense = f.shared if value == "shared.hidden" else f
    return "act(Wg·in) ⊙ W1·in" if isinstance(dense, GatedMLP) else "act(W1·in)"
