"""Which formulas a stage is drawn with: names of those in the page's table, by what this model has there."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from cutaway.lens.equations import position_module, uses_rope
from cutaway.lens.sites import Site
from cutaway.model import Transformer
from cutaway.model.attention import CrossAttention, LatentAttention
from cutaway.model.block import ParallelBlock
from cutaway.model.ffn import GatedMLP
from cutaway.model.norms import RMSNorm
from cutaway.model.positions import Alibi, LearnedPosition, SinusoidalPosition


def list_formulas(model: Transformer, site_name: str, sites: Mapping[str, Site]) -> list[str]:
    """In the order in which they are computed."""
    if site_name in ("logits", "softmax"):
        head: Any = model.head
        return ["softmax"] if site_name == "softmax" else ["logits.capped" if head.softcap is not None else "logits"]
    end = site_name.rsplit(".", 1)[-1]
    if "embed" in site_name:
        stack: Any = sites[f"{site_name[: site_name.index('embed')]}embed"].stack
        return _embedding_formulas(stack.embed, end)
    site = sites[site_name if site_name in sites else f"{site_name.rsplit('.', 1)[0]}.q"]
    if site.layer is None:
        return [_norm_formula(site.stack.final_norm)] if site.stack is not None else []
    stack = site.stack
    assert stack is not None
    block: Any = stack.blocks[site.layer]
    part = site_name.partition(f"blocks.{site.layer}.")[2].split(".")[0]
    if end in ("resid_pre", "resid_mid", "resid_post"):
        return _residual_formulas(block, site_name)
    branch = getattr(block, part)
    if end == "in":
        own = branch.norm_in if not isinstance(block, ParallelBlock) else block.norm
        return [_norm_formula(own)]
    if part == "ffn":
        return _ffn_formulas(branch.f, end)
    return _attention_formulas(branch.f, end, stack, site.layer)


def _embedding_formulas(embed: Any, suffix: str) -> list[str]:
    position = {LearnedPosition: "position.learned", SinusoidalPosition: "position.sinusoidal"}.get(
        type(embed.position), ""
    )
    token = "embed.scaled" if embed.scale != 1.0 else "embed"
    if suffix == "position":
        return [position] if position else []
    return [token] if suffix == "token" or not position else [token, position, "embed.sum"]


def _norm_formula(module: nn.Module) -> str:
    if isinstance(module, nn.Identity):
        return "norm.none"
    return "norm.rms" if isinstance(module, RMSNorm) else "norm.layer"


def _residual_formulas(block: Any, site_name: str) -> list[str]:
    if isinstance(block, ParallelBlock):
        return ["add.both"]
    made = "ffn" if site_name.endswith("resid_post") else "attn"
    after = getattr(block, f"norm_after_{made}", None)
    return ["add"] if after is None or isinstance(after, nn.Identity) else ["add.normed", _norm_formula(after)]


def _attention_formulas(attention: Any, suffix: str, stack: Any, layer: int) -> list[str]:
    cross, position = isinstance(attention, CrossAttention), position_module(stack, layer)
    turned = not cross and uses_rope(stack, layer)
    rope = "position.rope" if getattr(position, "interleaved", True) else "position.rope.half"
    if suffix in ("q", "k", "v"):
        if isinstance(attention, LatentAttention):
            return [f"latent.{suffix}"]
        source = f"{suffix}.memory" if cross and suffix != "q" else suffix
        return [source, rope] if turned and suffix != "v" else [source]
    if suffix == "position":
        if turned:
            return [rope]
        return ["position.alibi" if isinstance(position, Alibi) else "position.bias"] if position is not None else []
    if suffix == "scores":
        found = ["scores.capped" if attention.kernel.softcap is not None else "scores"]
        return found if turned or cross or position is None else [*found, "scores.bias"]
    if suffix == "mask":
        if cross or not stack.causal:
            return ["mask.none" if stack.windows[layer] is None or cross else "mask.window"]
        return ["mask.causal" if stack.windows[layer] is None else "mask.causal.window"]
    if suffix == "pattern":
        return ["pattern" if attention.sink is None else "pattern.sink"]
    return ["z"] if suffix == "z" else ["out"]


def _ffn_formulas(ffn: Any, suffix: str) -> list[str]:
    router = getattr(ffn, "router", None)
    if suffix == "router" or router is not None:
        return ["router"] if suffix == "router" else ["experts"]
    gated = isinstance(ffn, GatedMLP)
    return ["hidden.gated" if gated else "hidden"] if suffix == "hidden" else ["ffn"]
