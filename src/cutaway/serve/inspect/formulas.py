"""Which formulas a stage is drawn with: names of those in the page's table, by what this model has there."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cutaway.lens.equations import position_of, turns
from cutaway.lens.sites import Site
from cutaway.model import Transformer
from cutaway.model.attention import CrossAttention, Latent
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import Gated
from cutaway.model.norms import RMSNorm
from cutaway.model.positions import Alibi, Learned, Sinusoidal


def formulas(model: Transformer, name: str, known: Mapping[str, Site]) -> list[str]:
    """In the order in which they are computed."""
    if name in ("logits", "softmax"):
        head: Any = model.head
        return ["softmax"] if name == "softmax" else ["logits.capped" if head.softcap is not None else "logits"]
    end = name.rsplit(".", 1)[-1]
    if "embed" in name:
        stack: Any = known[f"{name[: name.index('embed')]}embed"].stack
        return of_embedding(stack.embed, end)
    site = known[name if name in known else f"{name.rsplit('.', 1)[0]}.q"]
    if site.layer is None:
        return [norm(site.stack.final_norm)] if site.stack is not None else []
    stack = site.stack
    assert stack is not None
    block: Any = stack.blocks[site.layer]
    part = name.partition(f"blocks.{site.layer}.")[2].split(".")[0]
    if end in ("resid_pre", "resid_mid", "resid_post"):
        return of_stream(block, name)
    branch = getattr(block, part)
    if end == "in":
        own = branch.norm_in if not isinstance(block, ParallelBlock) else block.norm
        return [norm(own)]
    if part == "ffn":
        return of_ffn(branch.f, end)
    return of_attention(branch.f, end, stack, site.layer)


def of_embedding(embed: Any, end: str) -> list[str]:
    position = {Learned: "position.learned", Sinusoidal: "position.sinusoidal"}.get(type(embed.position), "")
    token = "embed.scaled" if embed.scale != 1.0 else "embed"
    if end == "position":
        return [position] if position else []
    return [token] if end == "token" or not position else [token, position, "embed.sum"]


def norm(module: nn.Module) -> str:
    if isinstance(module, nn.Identity):
        return "norm.none"
    return "norm.rms" if isinstance(module, RMSNorm) else "norm.layer"


def of_stream(block: Any, name: str) -> list[str]:
    if isinstance(block, ParallelBlock):
        return ["add.both"]
    made = "ffn" if name.endswith("resid_post") else "attn"
    after = getattr(block, f"after_{made}", None)
    return ["add"] if after is None or isinstance(after, nn.Identity) else ["add.normed", norm(after)]


def of_attention(f: Any, end: str, stack: Any, layer: int) -> list[str]:
    cross, position = isinstance(f, CrossAttention), position_of(stack, layer)
    turned = not cross and turns(stack, layer)
    rope = "position.rope" if getattr(position, "interleaved", True) else "position.rope.half"
    if end in ("q", "k", "v"):
        if isinstance(f, Latent):
            return [f"latent.{end}"]
        source = f"{end}.memory" if cross and end != "q" else end
        return [source, rope] if turned and end != "v" else [source]
    if end == "position":
        if turned:
            return [rope]
        return ["position.alibi" if isinstance(position, Alibi) else "position.bias"] if position is not None else []
    if end == "scores":
        found = ["scores.capped" if f.kernel.softcap is not None else "scores"]
        return found if turned or cross or position is None else [*found, "scores.bias"]
    if end == "mask":
        if cross or not stack.causal:
            return ["mask.none" if stack.windows[layer] is None or cross else "mask.window"]
        return ["mask.causal" if stack.windows[layer] is None else "mask.causal.window"]
    if end == "pattern":
        return ["pattern" if f.sink is None else "pattern.sink"]
    return ["z"] if end == "z" else ["out"]


def of_ffn(f: Any, end: str) -> list[str]:
    router = getattr(f, "router", None)
    if end == "router" or router is not None:
        return ["router"] if end == "router" else ["experts"]
    gated = isinstance(f, Gated)
    return ["hidden.gated" if gated else "hidden"] if end == "hidden" else ["ffn"]
