"""What each site holds, written as the model's own equation: with the norms, rotations and scales that it has."""

from typing import Any

from torch import nn

from cutaway.lens.choice import end
from cutaway.lens.sites import Site
from cutaway.model import Transformer
from cutaway.model.attention import CrossAttention, Latent
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import Gated
from cutaway.model.rope import Rope
from cutaway.model.stack import Stack

STREAM = ("embed", "resid_pre", "resid_mid", "resid_post")
"""Ends of the names of sites that are the stream itself."""


def on_stream(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in STREAM


def same_as_before(name: str) -> bool:
    """What a block is given is what the one before it gave."""
    return name.endswith(".resid_pre") and not name.endswith(".cross.resid_pre")


def is_added(name: str) -> bool:
    return name.endswith(".out")


def stream_before(site: Site) -> str:
    """The stream that a sublayer reads, and that its result is added to."""
    assert site.stack is not None
    assert site.layer is not None
    here, part, _ = site.name.rsplit(".", 2)
    if part == "cross":
        return f"{here}.cross.resid_pre"
    in_turn = not isinstance(site.stack.blocks[site.layer], ParallelBlock)
    return f"{here}.resid_mid" if part == "ffn" and in_turn else f"{here}.resid_pre"


def only_adds(block: Any) -> bool:
    """Whether a block does nothing to the stream but add to it."""
    after = [getattr(block, name, None) for name in ("after_attn", "after_cross", "after_ffn")]
    return getattr(block, "keep", 1.0) == 1.0 and all(isinstance(norm, nn.Identity | None) for norm in after)


def equation(model: Transformer, site: Site) -> str:
    """In the letters that textbooks use; x is the stream."""
    if site.stack is None:
        return of_head(model)
    if site.layer is None:
        final: nn.Module = site.stack.final_norm
        return of_embedding(site.stack) if site.name.endswith("embed") else wrapped("norm", final, "x")
    name = end(site.name)
    block: Any = site.stack.blocks[site.layer]
    if on_stream(name):
        return of_stream(name, block)
    part, _, what = name.partition(".")
    branch = getattr(block, part)
    if what == "in":
        before = block.norm if isinstance(block, ParallelBlock) else branch.norm_in
        return wrapped("norm", before, wrapped("norm", branch.norm_in, "x") if before is not branch.norm_in else "x")
    found = of_ffn(branch.f, what) if part == "ffn" else of_attention(branch.f, what, site.stack, site.layer)
    if what == "out":
        found = wrapped("norm", branch.norm_out, found)
        return found if branch.scale == 1.0 else f"{branch.scale:.3g}·{found}"
    return found


def of_stream(name: str, block: Any) -> str:
    if name == "resid_pre":
        return "x"
    if isinstance(block, ParallelBlock):
        return "x + attn.out + ffn.out"
    made = {"cross.resid_pre": "attn", "resid_mid": "attn" if block.cross is None else "cross", "resid_post": "ffn"}
    part = made[name]
    kept = "x" if block.keep == 1.0 else f"{block.keep:.3g}·x"
    return wrapped("norm", getattr(block, f"after_{part}"), f"{kept} + {part}.out")


def wrapped(name: str, module: nn.Module, inner: str) -> str:
    """norm(inner), unless the norm does nothing."""
    return inner if isinstance(module, nn.Identity) else f"{name}({inner})"


def of_embedding(stack: Stack) -> str:
    embed = stack.embed
    found = "E[token]" if embed.scale == 1.0 else f"{embed.scale:.3g}·E[token]"
    if embed.project is not None and embed.project_first:
        found = f"W·{found}"
    found += "" if embed.position is None else " + position"
    found += "" if embed.types is None else " + type"
    found = wrapped("norm", embed.norm, found)
    bare = found if found.startswith("norm") or " + " not in found else f"({found})"
    return f"W·{bare}" if embed.project is not None and not embed.project_first else found


def of_head(model: Any) -> str:
    head = model.head
    found = "E·x" if head.matrix is model_table(model) else "U·x"
    found = found if head.transform is None else found.replace("x", "norm(act(W·x))")
    found += "" if head.bias is None else " + b"
    if head.scale != 1.0:
        found = f"{head.scale:.3g}·({found})" if head.bias is not None else f"{head.scale:.3g}·{found}"
    return found if head.softcap is None else f"cap({found})"


def model_table(model: Transformer) -> nn.Module:
    stack = model.stacks.get("decoder") or model.stacks["encoder"]
    return stack.embed.token


def of_attention(f: Any, what: str, stack: Stack, layer: int) -> str:
    cross, latent = isinstance(f, CrossAttention), isinstance(f, Latent)
    if what in ("q", "k", "v"):
        return of_latent(f, what) if latent else of_heads(f, what, turned=not cross and turns(stack, layer))
    if what == "scores":
        found = "q·kᵀ·scale" if f.kernel.softcap is None else "cap(q·kᵀ·scale)"
        position = None if cross else position_of(stack, layer)
        found += "" if position is None or isinstance(position, Rope) else " + bias"
        return found + (" + mask" if not cross and (stack.causal or stack.windows[layer] is not None) else "")
    if what == "pattern":
        return "softmax(scores)" if f.sink is None else "softmax(scores, sink)"
    return "pattern·v" if what == "z" else "Wo·z"


def of_heads(f: Any, what: str, *, turned: bool) -> str:
    found = f"W{what}·{'memory' if isinstance(f, CrossAttention) and what != 'q' else 'in'}"
    if what == "v":
        return found
    found = wrapped("norm", f.q_norm if what == "q" else f.k_norm, found)
    return f"rope({found})" if turned else found


def of_latent(f: Any, what: str) -> str:
    """MLA: c is the latent, and position is in a part of its own."""
    if what == "q":
        return "Wq·in, rope" if isinstance(f.q, nn.Linear) else "Wuq·norm(Wdq·in), rope"
    return "Wuk·c, rope(kr)" if what == "k" else "Wuv·c"


def position_of(stack: Stack, layer: int) -> nn.Module | None:
    return dict(stack.positions.items()).get(stack.position_of[layer])


def turns(stack: Stack, layer: int) -> bool:
    return isinstance(position_of(stack, layer), Rope)


def of_ffn(f: Any, what: str) -> str:
    router: Any = getattr(f, "router", None)
    if what == "router":
        return f"top {router.top_k} of {'softmax' if router.softmax else 'sigmoid'}(Wr·in)"
    if what == "out" and router is not None:
        return "Σ weight·expert(in)" + ("" if getattr(f, "shared", None) is None else " + shared")
    if what == "out":
        return "W2·hidden"
    dense = f.shared if what == "shared.hidden" else f
    return "act(Wg·in) ⊙ W1·in" if isinstance(dense, Gated) else "act(W1·in)"
