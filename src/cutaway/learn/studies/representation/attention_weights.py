"""Attention weight against importance: the weight of each edge (head, key) of tiny-python and the effect of removal."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutaway.evaluate.functional import kl_divergence_from_logits
from cutaway.learn.studies.rank_correlation import spearman
from cutaway.learn.studies.representation.python_texts import PROMPTS, load_model
from cutaway.learn.studies.representation.stacked_weights import attention_weights, num_layers
from cutaway.learn.studies.study import Estimate, estimate
from cutaway.lens.edit import edit
from cutaway.lens.trace import trace
from cutaway.model import Transformer

BATCH_SIZE = 64
VISIBLE_WEIGHT, LARGE_WEIGHT, SMALL_EFFECT = 0.1, 0.5, 0.01
"""Weights of an edge that count as visible and as large, and KL divergence in nats that counts as small."""


@dataclass(frozen=True)
class EdgeEffects:
    """Edges from the last token to each key, (layers, heads, keys)."""

    weight: Tensor
    norm: Tensor
    """Norm of what the edge adds to the residual stream, weight · ‖W_O·v‖, relative to the norm of the stream."""
    effect: Tensor
    """KL divergence of the next-token distribution, in nats, if the edge is removed."""
    token_effect: Tensor
    """(keys,): the same if all edges to a key are removed."""


@torch.no_grad()
def measure_edges(model: Transformer, ids: Tensor) -> EdgeEffects:
    """Remove each edge in turn: subtract weight · value from the head's output at the last token. `ids` is (1, T)."""
    with trace(model, "attn.pattern", "attn.v", "resid_pre") as t:
        logits = model(ids)[:, -1]
    layers = range(num_layers(model))
    weight = torch.stack([t[f"blocks.{layer}.attn.pattern"].as_subclass(Tensor)[0, :, -1] for layer in layers])
    values = torch.stack([t[f"blocks.{layer}.attn.v"].as_subclass(Tensor)[0].transpose(0, 1) for layer in layers])
    edges = weight[..., None] * values  # (L, H, T, E)
    resid = torch.stack([t[f"blocks.{layer}.resid_pre"].as_subclass(Tensor)[0, -1].norm() for layer in layers])
    norm = (edges @ attention_weights(model).o.mT).norm(dim=-1) / resid[:, None, None]
    effect = torch.stack([_edge_effects(model, ids, logits, layer, edges[layer]) for layer in layers])
    return EdgeEffects(weight, norm, effect, _token_effects(model, ids, logits))


def _edge_effects(model: Transformer, ids: Tensor, logits: Tensor, layer: int, edges: Tensor) -> Tensor:
    """(heads, keys): effects of removing one edge of a layer. `edges` is (heads, keys, E)."""
    num_heads, num_keys, _ = edges.shape
    indices = torch.cartesian_prod(torch.arange(num_heads), torch.arange(num_keys)).to(ids.device)
    effects = []
    for chosen in indices.split(BATCH_SIZE):
        rows = torch.arange(len(chosen), device=ids.device)
        heads, keys = chosen.T

        def remove(z: Tensor, rows: Tensor = rows, heads: Tensor = heads, keys: Tensor = keys) -> Tensor:
            z[rows, -1, heads] -= edges[heads, keys]
            return z

        with edit(model, {f"blocks.{layer}.attn.z": remove}):
            new = model(ids.expand(len(chosen), -1))[:, -1]
        effects.append(kl_divergence_from_logits(logits.expand_as(new), new))
    return torch.cat(effects).view(num_heads, num_keys)


def _token_effects(model: Transformer, ids: Tensor, logits: Tensor) -> Tensor:
    """(keys,): effects of zero weights, in all heads, from the last token to a key; batch row r removes key r."""
    rows = torch.arange(ids.shape[1], device=ids.device)

    def remove(pattern: Tensor) -> Tensor:
        pattern[rows, :, -1, rows] = 0
        return pattern

    with edit(model, {"blocks.*.attn.pattern": remove}):
        new = model(ids.expand(len(rows), -1))[:, -1]
    return kl_divergence_from_logits(logits.expand_as(new), new)


def measure_attention_weights(device: str, prompts: Sequence[str] = PROMPTS) -> dict[str, Estimate]:
    """Rank correlation of weight and effect, and disagreements of the two, over prompts."""
    checkpoint = load_model(device)
    assert checkpoint.tokenizer is not None
    rows: dict[str, list[float]] = {}
    for prompt in prompts:
        edges = measure_edges(checkpoint.model, torch.tensor([checkpoint.tokenizer.encode(prompt)], device=device))
        weight, effect = edges.weight, edges.effect
        visible, large = weight > VISIBLE_WEIGHT, weight > LARGE_WEIGHT
        row = {
            "spearman/edge": spearman(weight, effect),
            "spearman/visible-edge": spearman(weight[visible], effect[visible]),
            "spearman/visible-edge-norm": spearman(edges.norm[visible], effect[visible]),
            "spearman/token": spearman(weight.sum((0, 1)), edges.token_effect),
            "same-top-key": float((weight.argmax(-1) == effect.argmax(-1)).float().mean()),
            "first-token/weight": float(weight[..., 0].mean()),
            "first-token/effect": float(effect[..., 0].sum() / effect.sum()),
            "large-weight/edges": float(large.sum()),
            "large-weight/small-effect": float((effect[large] < SMALL_EFFECT).float().mean()),
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return {f"attention-weight/{name}": estimate(values) for name, values in rows.items()}
