"""Query: attention of one head for one query and key, step by step, from q·k to the residual stream."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.analysis.inputs import upcast_float32
from cutaway.lens.equations import position_module
from cutaway.lens.sites import Site, attention_module, get_blocks, resid_before_sublayer
from cutaway.model.attention import LatentAttention
from cutaway.model.masks import number_tokens
from cutaway.model.positions import Alibi, Disentangled, LearnedPosition, ScoreBias, SinusoidalPosition
from cutaway.model.rope import Rope, Rotation
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.formulas import is_default_scale, list_formulas
from cutaway.serve.inspect.queries.attention import (
    AttentionName,
    compute_pattern,
    find_attention_site,
    has_edited_pattern,
)
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex

ROUNDING_STEPS = 16
"""Tolerance of the checks, in units of the machine epsilon of the model's dtype times the sum of absolute terms."""


class WorkedAttention(InputQuery):
    """Every step of one head's attention: q·k, scale, softcap, bias, mask, softmax, weighted values and W_O.

    `position` is the query token, `key` the key token, by default the one with the largest weight. The scores, weights
    and value norms are of all keys of the query.
    """

    attention: AttentionName
    head: TokenIndex
    position: TokenIndex
    key: TokenIndex | None = None

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site, name, head = find_attention_site(inspector, self.attention, self.head), self.attention, self.head
        pattern, visible, sink_weights = compute_pattern(inspector, self.input, site, [head], job)
        num_queries, num_keys = visible.shape
        if self.position >= num_queries:
            raise InputError(f"position is {self.position}, but the query positions are 0 to {num_queries - 1}")
        weights = pattern[0, self.position]
        key = int(weights.argmax()) if self.key is None else self.key
        if key >= num_keys:
            raise InputError(f"key is {key}, but the key positions are 0 to {num_keys - 1}")
        activations = inspector.get_activations_at(self.input, [f"{name}.{part}" for part in "qkvz"], job)
        with inspector.lock, torch.no_grad():
            call = _HeadCall.of(activations, name, head, self.position)
            steps, tensors = _score_steps(call, key, visible[self.position])
            rotation = _find_rotation(activations, site)
            position_data, position_tensors = _describe_positions(site, rotation, call, self.position, key)
            value_data, value_tensors = _value_steps(activations, site, call, weights, head, self.position, key)
        data = {
            "attention": name,
            "head": head,
            "kv_head": head // call.group,
            "heads_per_kv_head": call.group,
            "position": self.position,
            "key": key,
            "weight": float(weights[key]),
            "sink_weight": None if sink_weights is None else float(sink_weights[0, self.position]),
            "sink_logit": None if call.sink is None else float(call.sink),
            "has_edited_pattern": has_edited_pattern(inspector, self.input, name),
            "mask": _describe_mask(site, visible, self.position, key),
            "position_method": position_data,
            "formulas": {
                part: list_formulas(inspector.model, f"{name}.{part}", inspector.sites)
                for part in ("scores", "mask", "pattern", "position", "z")
            },
            "weight_shares": _weight_shares(self.input.tokens, self.input.source, site, pattern, visible),
            **steps,
            **value_data,
        }
        tensors |= {"weights": weights, "visible": visible[self.position], **position_tensors, **value_tensors}
        return QueryResult(data, tensors)


class _HeadCall(NamedTuple):
    """Arguments of the attention kernel for one head and one query, in fp32."""

    q: Tensor
    """(D,)."""
    k: Tensor
    """(S, D)."""
    v: Tensor
    """(S, E)."""
    bias: Tensor | None
    """(S,): position bias added to the scores, or None."""
    sink: Tensor | None
    scores: Tensor
    """(S,): the model's scores, −∞ where masked."""
    scale: float
    softcap: float | None
    group: int
    """Number of query heads that share one key-value head."""
    eps: float
    """Machine epsilon of the model's dtype."""

    @staticmethod
    def of(activations: ActivationCache, name: str, head: int, position: int) -> "_HeadCall":
        kernel, args = activations.attention_calls[name]
        q, k, v, _, sink = attention_pattern.unpack_kernel_args(args)
        mask = attention_pattern.build_dense_mask(args)
        group = q.shape[2] // k.shape[2]
        bias = mask.bias
        if bias is not None:
            bias = bias[0, head if bias.shape[1] > 1 else 0, position].expand(k.shape[1])
        scores = attention_pattern.compute_scores(kernel, args, [head], mask).scores[0, 0, position]
        return _HeadCall(
            q=upcast_float32(q[0, position, head]),
            k=upcast_float32(k[0, :, head // group]),
            v=upcast_float32(v[0, :, head // group]),
            bias=None if bias is None else upcast_float32(bias),
            sink=None if sink is None else sink[head].detach(),
            scores=upcast_float32(scores),
            scale=float(kernel.scale),
            softcap=kernel.softcap,
            group=group,
            eps=torch.finfo(q.dtype).eps,
        )


def _score_steps(call: _HeadCall, key: int, visible: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return q·k, and the score after scale, softcap and bias, with the score at the site `scores` to compare."""
    products = call.q.double() * call.k[key].double()
    dot = float(products.sum())
    scaled = dot * call.scale
    capped = scaled if call.softcap is None else call.softcap * float(torch.tanh(torch.tensor(scaled / call.softcap)))
    bias = None if call.bias is None else float(call.bias[key])
    score = capped + (bias or 0.0)
    site_score = float(call.scores[key]) if visible[key] else None
    tolerance = ROUNDING_STEPS * call.eps * (float(products.abs().sum()) * call.scale + abs(bias or 0.0) + 1e-6)
    data = {
        "d_head": len(call.q),
        "dot": dot,
        "scale": call.scale,
        "is_default_scale": is_default_scale(call.scale, len(call.q)),
        "scaled": scaled,
        "softcap": call.softcap,
        "capped": capped,
        "bias": bias,
        "score": score,
        "site_score": site_score,
        "score_matches": None if site_score is None else abs(score - site_score) <= tolerance,
    }
    scores = call.scores.masked_fill(~visible, 0.0)
    return data, {"q": call.q, "k": call.k[key], "scores": scores}


def _value_steps(
    activations: ActivationCache, site: Site, call: _HeadCall, weights: Tensor, head: int, position: int, key: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return z = Σ w·v with the head output at the site `z` to compare, and the norm of what W_O adds."""
    name = site.name.removesuffix(".pattern")
    assert site.stack is not None
    assert site.layer is not None
    branch = getattr(get_blocks(site.stack)[site.layer], name.rpartition(".")[2])
    z = weights.to(call.v.dtype) @ call.v
    site_z = upcast_float32(activations[f"{name}.z"][position])  # (H, E)
    tolerance = ROUNDING_STEPS * call.eps * (float((weights[:, None] * call.v).abs().sum(0).max()) + 1e-6)
    output = upcast_float32(attention_module(branch).o.weight).view(-1, *site_z.shape)  # (d, H, E)
    added = output[:, head] @ site_z[head] * branch.scale
    has_output_norm = not isinstance(branch.norm_out, nn.Identity)
    resid = activations.values.get(resid_before_sublayer(site))
    data = {
        "z_difference": float((z - site_z[head]).abs().max()),
        "z_matches": bool((z - site_z[head]).abs().max() <= tolerance),
        "z_norm": float(site_z[head].norm()),
        "added_norm": float(added.norm()),
        "has_output_norm": has_output_norm,
        "resid_norm": None if resid is None else float(upcast_float32(resid[0, position]).norm()),
    }
    return data, {"value_norms": call.v.norm(dim=-1), "z": site_z[head], "v": call.v[key]}


def _describe_mask(site: Site, visible: Tensor, position: int, key: int) -> dict[str, Any]:
    """Return whether the key is visible to the query, and the mask rules of this attention.

    `masked_by` has the rules that hide the key: `causal`, `window`, or `other`.
    """
    stack, is_cross = site.stack, ".cross." in site.name
    assert stack is not None
    assert site.layer is not None
    window = None if is_cross else stack.windows[site.layer]
    # The edit that drops the causal mask is not active here, so the mask itself says whether it was applied.
    is_causal = not is_cross and stack.causal and not bool(visible.triu(1).any())
    masked_by = []
    if not visible[position, key]:
        masked_by += ["causal"] if is_causal and key > position else []
        masked_by += ["window"] if window is not None and abs(position - key) >= window else []
        masked_by = masked_by or ["other"]
    return {
        "is_visible": bool(visible[position, key]),
        "masked_by": masked_by,
        "is_causal": is_causal,
        "is_cross": is_cross,
        "window": window,
        "num_visible": int(visible[position].sum()),
        "num_keys": visible.shape[1],
    }


def _find_rotation(activations: ActivationCache, site: Site) -> Rotation | None:
    """Return the rotation that RoPE applied in this attention, or None."""
    if ".cross." in site.name:
        return None
    assert site.stack is not None
    assert site.layer is not None
    prefix = site.name[: site.name.index("blocks.")]
    rotation = activations.position_outputs.get(f"{prefix}{site.stack.layer_position_keys[site.layer]}")
    return rotation if isinstance(rotation, Rotation) else None


def _describe_positions(
    site: Site, rotation: Rotation | None, call: _HeadCall, position: int, key: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return how positions enter this attention. With RoPE, also q and k before rotation, and the angles."""
    stack, layer = site.stack, site.layer
    assert stack is not None
    assert layer is not None
    module = None if ".cross." in site.name else position_module(stack, layer)
    data: dict[str, Any] = {"kind": "none", "embedding": _name_embedding(stack.embed.position)}
    if isinstance(module, ScoreBias):
        is_dropped = call.bias is None
        data["kind"] = "none" if is_dropped else "alibi" if isinstance(module, Alibi) else "relative_bias"
    if isinstance(module, Disentangled):
        data["kind"] = "disentangled"
    if not isinstance(module, Rope) or rotation is None:
        return data, {}
    cos, sin = (upcast_float32(part)[0].squeeze(-2) for part in (rotation.cos, rotation.sin))  # (T or 1, pairs)
    num_pairs = cos.shape[-1]
    attention = attention_module(get_blocks(stack)[layer].attn)
    first = len(call.q) - 2 * num_pairs if isinstance(attention, LatentAttention) else 0
    dims = torch.arange(first, first + 2 * num_pairs)
    pairs = dims.view(-1, 2) if rotation.interleaved else dims.view(2, -1).T
    frequency = module.select_frequencies(number_tokens(1, len(call.k), cos.device)).flatten()[:num_pairs].float()
    angles = torch.atan2(sin, cos)  # (T, pairs), from −π to π
    expected = frequency * torch.tensor([position, key], device=cos.device)[:, None]  # (2, pairs)
    moved = not torch.allclose(torch.cos(expected), torch.cos(angles[[position, key]]), atol=1e-2)
    data |= {"kind": "rope", "theta": module.theta, "is_moved": moved, "num_pairs": num_pairs}
    tensors = {
        "q_before": _rotate_back(call.q, cos[position], sin[position], pairs),
        "k_before": _rotate_back(call.k[key], cos[key], sin[key], pairs),
        "frequency": frequency,
        "q_angle": angles[position] if moved else expected[0],
        "k_angle": angles[key] if moved else expected[1],
        "pairs": pairs,
    }
    return data, tensors


def _rotate_back(x: Tensor, cos: Tensor, sin: Tensor, pairs: Tensor) -> Tensor:
    """Return the vector (D,) that RoPE rotated to `x`. YaRN and LongRoPE also multiply cos and sin by a factor."""
    a, b, squared_factor = x[pairs[:, 0]], x[pairs[:, 1]], cos.square() + sin.square()
    before = x.clone()
    before[pairs[:, 0]] = (a * cos + b * sin) / squared_factor
    before[pairs[:, 1]] = (b * cos - a * sin) / squared_factor
    return before


def _name_embedding(position: nn.Module | None) -> str | None:
    names = {LearnedPosition: "learned", SinusoidalPosition: "sinusoidal"}
    return None if position is None else names.get(type(position))


def _weight_shares(
    tokens: Sequence[int], source: Sequence[int] | None, site: Site, pattern: Tensor, visible: Tensor
) -> list[dict[str, Any]]:
    """Return the head's share of attention weight on each type of key, averaged over the queries that have one.

    A key outside of a sliding window counts with weight 0. The types overlap: the previous token may be the first
    token. The query 0 is left out of self-attention, because it has no previous token and, with a causal mask, no
    choice.
    """
    weights, is_cross = pattern[0], ".cross." in site.name
    query_ids = torch.tensor(source if site.name.startswith("encoder.") and source is not None else tokens)
    key_ids = torch.tensor(source) if is_cross and source is not None else query_ids
    t, s = torch.arange(len(query_ids))[:, None], torch.arange(len(key_ids))[None]
    same = query_ids[:, None] == key_ids[None]
    if is_cross:
        types = {
            "first_source_token": (s == 0).expand_as(same),
            "last_source_token": (s == len(key_ids) - 1).expand_as(same),
            "same_position": s == t,
            "same_text": same,
        }
        queries = torch.ones(len(query_ids), dtype=torch.bool)
    else:
        after_earlier = torch.zeros_like(same)
        after_earlier[:, 1:] = same[:, :-1] & (s[:, 1:] < t)
        types = {
            "first_token": (s == 0).expand_as(same),
            "previous_token": s == t - 1,
            "query_token": s == t,
            "earlier_occurrence": same & (s < t),
            "after_earlier_occurrence": after_earlier,
        }
        if not bool((~visible).any()) or bool(visible.triu(1).any()):
            types["next_token"] = s == t + 1
        queries = torch.arange(len(query_ids)) > 0
    shares = []
    for name, selected in types.items():
        chosen = queries & selected.any(-1)
        share = float((weights.cpu() * selected).sum(-1)[chosen].mean()) if chosen.any() else None
        shares.append({"type": name, "share": share, "num_queries": int(chosen.sum())})
    return shares
