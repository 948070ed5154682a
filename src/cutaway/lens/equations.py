"""What each site holds, written as the model's own equation: with the norms, rotations and scales that it has."""

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
    """In the letters that textbooks use; x is the stream."""
    if site.stack is None:
        return _head_equation(model)
    if site.layer is None:
        final: nn.Module = site.stack.final_norm
        return _embedding_equation(site.stack) if site.name.endswith("embed") else _wrap_norm("norm", final, "x")
    name = site_suffix(site.name)
    block: Any = site.stack.blocks[site.layer]
    if is_resid_site(name):
        return _resid_equation(name, block)
    part, _, what = name.partition(".")
    branch = getattr(block, part)
    if what == "in":
        before = block.norm if isinstance(block, ParallelBlock) else branch.norm_in
        return _wrap_norm(
            "norm", before, _wrap_norm("norm", branch.norm_in, "x") if before is not branch.norm_in else "x"
        )
    found = (
        _ffn_equation(branch.f, what) if part == "ffn" else _attention_equation(branch.f, what, site.stack, site.layer)
    )
    if what == "out":
        found = _wrap_norm("norm", branch.norm_out, found)
        return found if branch.scale == 1.0 else f"{branch.scale:.3g}·{found}"
    return found


def _resid_equation(name: str, block: Any) -> str:
    if name == "resid_pre":
        return "x"
    if isinstance(block, ParallelBlock):
        return "x + attn.out + ffn.out"
    made = {"cross.resid_pre": "attn", "resid_mid": "attn" if block.cross is None else "cross", "resid_post": "ffn"}
    part = made[name]
    kept = "x" if block.skip_scale == 1.0 else f"{block.skip_scale:.3g}·x"
    return _wrap_norm("norm", getattr(block, f"norm_after_{part}"), f"{kept} + {part}.out")


def _wrap_norm(name: str, module: nn.Module, inner: str) -> str:
    """norm(inner), unless the norm does nothing."""
    return inner if isinstance(module, nn.Identity) else f"{name}({inner})"


def _embedding_equation(stack: Stack) -> str:
    embed = stack.embed
    found = "E[token]" if embed.scale == 1.0 else f"{embed.scale:.3g}·E[token]"
    if embed.project is not None and embed.project_before_positions:
        found = f"W·{found}"
    found += "" if embed.position is None else " + position"
    found += "" if embed.token_types is None else " + type"
    found = _wrap_norm("norm", embed.norm, found)
    bare = found if found.startswith("norm") or " + " not in found else f"({found})"
    return f"W·{bare}" if embed.project is not None and not embed.project_before_positions else found


def _head_equation(model: Any) -> str:
    head = model.head
    found = "E·x" if head.matrix is _token_embedding(model) else "U·x"
    found = found if head.transform is None else found.replace("x", "norm(act(W·x))")
    found += "" if head.bias is None else " + b"
    if head.scale != 1.0:
        found = f"{head.scale:.3g}·({found})" if head.bias is not None else f"{head.scale:.3g}·{found}"
    return found if head.softcap is None else f"cap({found})"


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
        found = "q·kᵀ·scale" if f.kernel.softcap is None else "cap(q·kᵀ·scale)"
        position = None if cross else position_module(stack, layer)
        found += "" if position is None or isinstance(position, Rope) else " + bias"
        return found + (" + mask" if not cross and (stack.causal or stack.windows[layer] is not None) else "")
    if value == "pattern":
        return "softmax(scores)" if f.sink is None else "softmax(scores, sink)"
    return "pattern·v" if value == "z" else "Wo·z"


def _projection_equation(f: Any, projection: str, *, with_rope: bool) -> str:
    found = f"W{projection}·{'memory' if isinstance(f, CrossAttention) and projection != 'q' else 'in'}"
    if projection == "v":
        return found
    found = _wrap_norm("norm", f.q_norm if projection == "q" else f.k_norm, found)
    return f"rope({found})" if with_rope else found


def _latent_equation(f: Any, projection: str) -> str:
    """MLA: c is the latent, and position is in a part of its own."""
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
