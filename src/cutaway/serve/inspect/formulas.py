"""Names of the formulas that compute the activation at a site. The web page has a table of formulas by name."""

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
from cutaway.model.positions import Alibi, LearnedPosition, ScoreBias, SinusoidalPosition


def list_formulas(model: Transformer, site_name: str, sites: Mapping[str, Site]) -> list[str]:
    """Return the names of the formulas that compute the activation at a site, in the order of computation."""
    if site_name in ("logits", "softmax"):
        head: Any = model.head
        return ["softmax"] if site_name == "softmax" else ["logits.capped" if head.softcap is not None else "logits"]
    suffix = site_name.rsplit(".", 1)[-1]
    if "embed" in site_name:
        stack: Any = sites[f"{site_name[: site_name.index('embed')]}embed"].stack
        return _embedding_formulas(stack.embed, suffix)
    site = sites[site_name if site_name in sites else f"{site_name.rsplit('.', 1)[0]}.q"]
    if site.layer is None:
        return [_norm_formula(site.stack.final_norm)] if site.stack is not None else []
    stack = site.stack
    assert stack is not None
    block: Any = stack.blocks[site.layer]
    sublayer = site_name.partition(f"blocks.{site.layer}.")[2].split(".")[0]
    if suffix in ("resid_pre", "resid_mid", "resid_post"):
        return _residual_formulas(block, site_name)
    branch = getattr(block, sublayer)
    if suffix == "in":
        norm = branch.norm_in if not isinstance(block, ParallelBlock) else block.norm
        return [_norm_formula(norm)]
    if sublayer == "ffn":
        return _ffn_formulas(branch.f, suffix)
    return _attention_formulas(branch.f, suffix, stack, site.layer)


def _embedding_formulas(embed: Any, suffix: str) -> list[str]:
    names = {LearnedPosition: "position.learned", SinusoidalPosition: "position.sinusoidal"}
    position = names.get(type(embed.position), "")
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
    sublayer = "ffn" if site_name.endswith("resid_post") else "attn"
    if block.norm_skip:
        return [_norm_formula(getattr(block, sublayer).norm_in), "add"]
    norm = getattr(block, f"norm_after_{sublayer}", None)
    return ["add"] if norm is None or isinstance(norm, nn.Identity) else ["add.normed", _norm_formula(norm)]


def _attention_formulas(attention: Any, suffix: str, stack: Any, layer: int) -> list[str]:
    is_cross, position = isinstance(attention, CrossAttention), position_module(stack, layer)
    has_rope = not is_cross and uses_rope(stack, layer)
    rope = "position.rope" if getattr(position, "interleaved", True) else "position.rope.half"
    if suffix in ("q", "k", "v"):
        if isinstance(attention, LatentAttention):
            return [f"latent.{suffix}"]
        source = f"{suffix}.memory" if is_cross and suffix != "q" else suffix
        return [source, rope] if has_rope and suffix != "v" else [source]
    if suffix == "position":
        if has_rope:
            return [rope]
        if not isinstance(position, ScoreBias):  # none, or disentangled attention, whose scores depend on q and k
            return []
        return ["position.alibi" if isinstance(position, Alibi) else "position.bias"]
    if suffix == "scores":
        is_latent = isinstance(attention, LatentAttention)
        d_head = attention.d_nope + attention.d_rope if is_latent else attention.d_head
        formulas = ["scores.capped" if attention.kernel.softcap is not None else "scores"]
        formulas[0] += "" if is_default_scale(attention.kernel.scale, d_head) else ".scale"
        return formulas if has_rope or is_cross or position is None else [*formulas, "scores.bias"]
    if suffix == "mask":
        if is_cross or not stack.causal:
            return ["mask.none" if stack.windows[layer] is None or is_cross else "mask.window"]
        return ["mask.causal" if stack.windows[layer] is None else "mask.causal.window"]
    if suffix == "pattern":
        return ["pattern" if attention.sink is None else "pattern.sink"]
    return ["z"] if suffix == "z" else ["out"]


def is_default_scale(scale: float, d_head: int) -> bool:
    """Whether the scale of the scores is 1/√d_head."""
    return abs(scale * d_head**0.5 - 1) < 1e-6


def _ffn_formulas(ffn: Any, suffix: str) -> list[str]:
    router = getattr(ffn, "router", None)
    if suffix == "router" or router is not None:
        return ["router"] if suffix == "router" else ["experts"]
    is_gated = isinstance(ffn, GatedMLP)
    return ["hidden.gated" if is_gated else "hidden"] if suffix == "hidden" else ["ffn"]
