"""Query: architecture of the model, as the block diagram of the web page shows it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from cutaway.config import Config
from cutaway.config.attention import LatentAttention, MultiHead
from cutaway.config.ffn import FFN, ClampedSwiGLU, Moe
from cutaway.config.head import LMHead
from cutaway.config.positions import LearnedPosition, RelativeBias, Rope, SinusoidalPosition
from cutaway.config.stack import Block, CrossBlock
from cutaway.config.stack import Stack as StackConfig
from cutaway.config.transformer import Encoder
from cutaway.model.block import ParallelBlock
from cutaway.model.stack import Stack
from cutaway.serve.inspect.formulas import list_formulas
from cutaway.serve.inspect.queries.base import Inspector, Query, QueryJob, QueryResult

ATTENTION_SITES = ("q", "k", "v", "position", "scores", "mask", "pattern", "z", "out")
FFN_SITES = ("router", "hidden", "out")


class Architecture(Query):
    """Embedding, blocks, norms and head of the model, with the sizes and the number of parameters of each component.

    Blocks that differ only in their weights have the same block kind. Shared parameters (a tied head, the blocks of
    ALBERT) are counted where they are first used.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        model, config, counter = inspector.model, inspector.config, ParameterCounter()
        stacks = {
            name: _describe_stack(inspector, name, config.stacks[name], stack, counter)
            for name, stack in model.stacks.items()
        }
        data = {
            "form": config.form,
            "d_model": config.d_model,
            "vocab_size": config.vocab_size,
            "context": config.context,
            "stacks": stacks,
            "head": _describe_head(inspector, counter),
            "pooler": counter.count(model.pooler) if isinstance(config, Encoder) and config.pooler else None,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        return QueryResult(data)


class ParameterCounter:
    """Counts the parameters of modules. A parameter that was counted before is not counted again."""

    def __init__(self) -> None:
        self.counted: set[int] = set()

    def count(self, *modules: Any) -> int:
        new = {
            id(parameter): parameter for module in modules if module is not None for parameter in module.parameters()
        }
        total = sum(parameter.numel() for key, parameter in new.items() if key not in self.counted)
        self.counted |= new.keys()
        return total


def _describe_stack(
    inspector: Inspector, name: str, config: StackConfig, stack: Stack, counter: ParameterCounter
) -> dict[str, Any]:
    prefix = f"{name}." if len(inspector.model.stacks) > 1 else ""
    d_model = inspector.config.d_model
    embedding = _describe_embedding(inspector, prefix, config, stack, counter)
    first_norm_differs = getattr(config.placement, "skip_first_prenorm", False)
    keys = [(block, first_norm_differs and layer == 0) for layer, block in enumerate(config.blocks)]
    kinds = list(dict.fromkeys(keys))
    first_layers = [keys.index(kind) for kind in kinds]
    return {
        "prefix": prefix,
        "is_causal": stack.causal,
        "vocab_size": stack.vocab_size,
        "embedding": embedding,
        "norm": config.norm.kind,
        "placement": config.placement.kind,
        "skip_scale": getattr(config.placement, "skip_scale", 1.0),
        "residual_scale": config.residual_scale,
        "block_kinds": [
            {
                "label": label,
                "count": keys.count(kind),
                **_describe_block(kind[0], d_model),
                "formulas": dict(_list_block_formulas(inspector, f"{prefix}blocks.{layer}.", kind[0])),
            }
            for kind, layer, label in zip(kinds, first_layers, _label_kinds(kinds, d_model), strict=True)
        ],
        "blocks": [
            {"kind": kinds.index(key), **_count_block(stack, config, layer, counter)} for layer, key in enumerate(keys)
        ],
        "final_norm": None if _is_identity(stack.final_norm) else counter.count(stack.final_norm),
        "final_norm_formulas": list_formulas(inspector.model, f"{prefix}final_norm", inspector.sites),
    }


def _describe_embedding(
    inspector: Inspector, prefix: str, config: StackConfig, stack: Stack, counter: ParameterCounter
) -> dict[str, Any]:
    embedding, d_model = config.embedding, inspector.config.d_model
    position, max_positions = embedding.position, None
    if isinstance(position, LearnedPosition):
        max_positions = position.length
    elif isinstance(position, SinusoidalPosition):
        max_positions = position.table_length
    is_shared = all(id(parameter) in counter.counted for parameter in stack.embed.token.parameters())
    return {
        "token_parameters": counter.count(stack.embed.token),
        "is_shared": is_shared,
        "other_parameters": counter.count(stack.embed),
        "table_dim": embedding.token_table_dim(d_model),
        "scale": stack.embed.scale,
        "position": position.kind,
        "max_positions": max_positions,
        "token_types": embedding.token_types,
        "norm": embedding.norm.kind,
        "formulas": list_formulas(inspector.model, f"{prefix}embed", inspector.sites),
    }


def _describe_block(block: Block, d_model: int) -> dict[str, Any]:
    cross = block.cross if isinstance(block, CrossBlock) else None
    return {
        "attn": _describe_attention(block.attention, d_model),
        "cross": None if cross is None else _describe_attention(cross, d_model),
        "ffn": _describe_ffn(block.ffn, d_model),
    }


def _describe_attention(attention: Any, d_model: int) -> dict[str, Any]:
    position = getattr(attention, "position", None)
    is_latent = isinstance(attention, LatentAttention)
    d_head = attention.head_dim(d_model)
    rotary_dim = getattr(position, "rotary_dim", None) or d_head
    if isinstance(attention, LatentAttention):
        rotary_dim = attention.d_rope
    return {
        "kind": attention.kind,
        "heads": attention.heads,
        "kv_heads": attention.heads if is_latent else attention.num_kv_heads,
        "d_head": d_head,
        "d_value": attention.d_value if is_latent else d_head,
        "q_rank": attention.q_rank if is_latent else None,
        "kv_rank": attention.kv_rank if is_latent else None,
        "window": getattr(attention, "window", None),
        "position": "none" if position is None else position.kind,
        "rotary_dim": rotary_dim if isinstance(position, Rope) else None,
        "buckets": position.buckets if isinstance(position, RelativeBias) else None,
        "softcap": getattr(attention, "softcap", None),
        "has_qk_norm": getattr(attention, "qk_norm", None) is not None,
        "has_sink": isinstance(attention, MultiHead) and attention.sink,
    }


def _describe_ffn(ffn: FFN, d_model: int) -> dict[str, Any]:
    expert = ffn.expert if isinstance(ffn, Moe) else ffn
    shared = ffn.shared if isinstance(ffn, Moe) else None
    return {
        "kind": ffn.kind,
        "expert_kind": expert.kind,
        "hidden": expert.hidden_dim(d_model),
        "activation": "silu" if isinstance(expert, ClampedSwiGLU) else expert.activation,
        "experts": ffn.experts if isinstance(ffn, Moe) else None,
        "top_k": ffn.router.top_k if isinstance(ffn, Moe) else None,
        "shared_hidden": None if shared is None else shared.hidden_dim(d_model),
    }


def _label_kinds(kinds: list[tuple[Block, bool]], d_model: int) -> list[str]:
    """Return what distinguishes each block kind from the others, such as "window 4,096". Empty for a single kind."""
    if len(kinds) == 1:
        return [""]
    described = [
        {
            "attention": "latent attention" if block.attention.kind == "latent" else "multi-head attention",
            "window": f"window {block.attention.window:,}" if block.attention.window else "full attention",
            "heads": f"{block.attention.heads} heads of {block.attention.head_dim(d_model)}",
            "position": _label_position(block.attention),
            "ffn": "mixture of experts" if isinstance(block.ffn, Moe) else "dense FFN",
            "hidden": f"FFN hidden size {_describe_ffn(block.ffn, d_model)['hidden']:,}",
            "norm": "no norm before attention" if skips_norm else "norm before attention",
        }
        for block, skips_norm in kinds
    ]
    if len({labels["ffn"] for labels in described}) > 1:
        described = [labels | {"hidden": ""} for labels in described]
    names = [name for name in described[0] if len({labels[name] for labels in described}) > 1]
    return [", ".join(labels[name] for name in names if labels[name]) for labels in described]


def _label_position(attention: MultiHead | LatentAttention) -> str:
    position = attention.position
    return f"RoPE θ {position.theta:,.0f}" if isinstance(position, Rope) else f"position {position.kind}"


def _list_block_formulas(inspector: Inspector, prefix: str, block: Block) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each site of a block, such as `attn.q`, and the names of its formulas."""
    sublayers = ["attn", "cross"] if isinstance(block, CrossBlock) else ["attn"]
    names = [f"{sublayer}.{site}" for sublayer in sublayers for site in ("in", *ATTENTION_SITES)]
    names += [f"ffn.{site}" for site in ("in", *FFN_SITES) if f"{prefix}ffn.{site}" in inspector.sites]
    for name in [*names, "resid_mid", "resid_post"]:
        has_site = f"{prefix}{name}" in inspector.sites or name.endswith((".mask", ".position"))
        if has_site and not name.startswith("cross.position"):
            yield name, list_formulas(inspector.model, f"{prefix}{name}", inspector.sites)


def _count_block(stack: Stack, config: StackConfig, layer: int, counter: ParameterCounter) -> dict[str, Any]:
    """Return the number of parameters of each sublayer and norm of a block. A norm that does not exist is None.

    A relative bias that layers share is counted in the first of these layers.
    """
    block: Any = stack.blocks[layer]
    first = config.weight_sets.index(config.weight_sets[layer])
    position = dict(stack.positions.items()).get(stack.layer_position_keys[layer])

    def count_norm(module: nn.Module | None) -> int | None:
        return None if module is None or _is_identity(module) else counter.count(module)

    sublayers: dict[str, Any] = {}
    norm = count_norm(block.norm) if isinstance(block, ParallelBlock) else None
    for name in ("attn", "cross", "ffn"):
        branch = getattr(block, name, None)
        if branch is None:
            continue
        own_position = position if name == "attn" else None
        sublayers[name] = {
            "parameters": counter.count(branch.f, own_position),
            "matrices": _list_matrices(branch.f),
            "norm_in": count_norm(branch.norm_in),
            "norm_out": count_norm(branch.norm_out),
            "norm_after": count_norm(getattr(block, f"norm_after_{name}", None)),
        }
    return {"sublayers": sublayers, "norm": norm, "shared_with": None if first == layer else first}


def _list_matrices(module: nn.Module) -> list[dict[str, Any]]:
    """Return name, shape and number of parameters (with bias) of the weight matrices of a sublayer.

    The shape is (output, input), or (experts, output, input).
    """
    return [
        {
            "name": name,
            "shape": list(child.weight.shape),
            "parameters": sum(parameter.numel() for parameter in child.parameters(recurse=False)),
        }
        for name, child in module.named_modules()
        if getattr(child, "weight", None) is not None and child.weight.ndim > 1
    ]


def _describe_head(inspector: Inspector, counter: ParameterCounter) -> dict[str, Any] | None:
    config: Config = inspector.config
    if inspector.head is None or not isinstance(config.head, LMHead):
        return None
    return {
        "parameters": counter.count(inspector.head),
        "is_tied": config.head.tied,
        "has_transform": config.head.transform is not None,
        "has_bias": config.head.bias != "none",
        "softcap": config.head.softcap,
        "formulas": list_formulas(inspector.model, "logits", inspector.sites),
    }


def _is_identity(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity)
