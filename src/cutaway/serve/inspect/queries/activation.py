"""Query: the activation of one token at one site, with formula, axes, statistics and Python snippet."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.equations import site_equation
from cutaway.lens.sites import AXIS_NAMES, Site
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.formulas import list_formulas
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex
from cutaway.serve.inspect.snippet import build_snippet

NUM_TOP_LOGITS = 50
"""Number of logits returned, of the whole vocabulary."""
NUM_HISTOGRAM_BINS = 60


class Activation(InputQuery):
    """Activation at a site, or at one of `embed.token`, `….attn.position`, `….attn.mask`, `softmax`."""

    site: Annotated[str, Field(max_length=80)]
    position: TokenIndex
    source_position: TokenIndex = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        name = self.site
        is_encoder = name.startswith("encoder.") and len(inspector.model.stacks) > 1
        reads_source = is_encoder or (".cross." in name and name.endswith((".k", ".v")))
        token_index = self.source_position if reads_source else self.position
        token_ids = (self.input.source or ()) if reads_source else self.input.tokens
        if token_index >= len(token_ids):
            raise InputError(
                f"position is {token_index}; the text has {len(token_ids)} tokens, so use 0 to {len(token_ids) - 1}"
            )
        if name in ("logits", "softmax"):
            return _logits_result(
                inspector, inspector.get_activations_at(self.input, [final_norm_site(inspector)], job), self, name
            )
        parent, _, suffix = name.rpartition(".")
        cached_site = f"{parent}.q" if suffix in ("scores", "pattern", "mask", "position") else name
        cached_site = parent if suffix in ("token", "position") and parent.endswith("embed") else cached_site
        if cached_site not in inspector.sites:
            raise InputError(
                f"'{name}' is not a site of this model; use one of {', '.join(list(inspector.sites)[:4])} …"
            )
        activations = inspector.get_activations_at(self.input, [cached_site], job)
        with inspector.lock, torch.no_grad():
            values, axes, shape = _read_activation(inspector, activations, name, token_index)
        site = inspector.sites.get(name)
        data: dict[str, Any] = {
            "site": name,
            "equation": "" if site is None else site_equation(inspector.model, site),
            "formulas": list_formulas(inspector.model, name, inspector.sites),
            "axes": [
                {"letter": letter, "name": AXIS_NAMES[letter], "size": size}
                for letter, size in zip(axes, shape, strict=True)
            ],
            "value_axes": _token_axes(axes),
            "python_code": build_snippet(inspector, self.input, name, token_index),
        }
        masked = values == -torch.inf
        finite_values = values.masked_fill(masked, 0.0) if masked.any() else values
        tensors = {"values": finite_values} | ({"masked": masked} if masked.any() else {})
        return QueryResult(data | _summarize_values(values), tensors)


def _token_axes(axes: str) -> str:
    """Axes of one token's values."""
    return axes.replace("T", "").replace("S", "", 1) if "T" not in axes else axes.replace("T", "")


def _summarize_values(values: Tensor) -> dict[str, Any]:
    finite = values[values.isfinite()].float()
    if not len(finite):
        return {"norm": 0.0, "min": 0.0, "max": 0.0, "mean": 0.0}
    return {
        "norm": float(finite.norm()),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(finite.mean()),
    }


def _read_activation(
    inspector: Inspector, activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Return one token's values, and the axes and shape of the whole activation."""
    if site_name.endswith((".scores", ".pattern", ".mask")):
        return compute_attention_row(activations, site_name, position)
    if site_name.endswith(".position") or site_name.endswith("embed.token"):
        return _compute_position_values(inspector, activations, site_name, position)
    site: Site = inspector.sites[site_name]
    value = activations.values[site_name]
    value = value if site.axes == "NK" else value[0]
    axes = "TK" if site.axes == "NK" else site.axes[1:]
    return value[position].float(), axes, tuple(value.shape)


def compute_attention_row(
    activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Recompute one query row of scores, pattern or mask, (H, S)."""
    attention, _, suffix = site_name.rpartition(".")
    kernel, args = activations.attention_calls[attention]
    q, k, v, prepared_mask, sink = attention_pattern.unpack_kernel_args(args)
    mask = attention_pattern.build_dense_mask(args)
    shape = (q.shape[2], q.shape[1], k.shape[1])
    if suffix == "mask":
        masked = mask.masked[0, :, position].expand(q.shape[2], -1)
        return torch.zeros_like(masked, dtype=torch.float32).masked_fill(masked, -torch.inf), "HTS", shape
    fully_masked = None if mask.fully_masked is None else mask.fully_masked[:, :, position : position + 1]
    bias = None if mask.bias is None else mask.bias[:, :, position : position + 1]
    row = attention_pattern.AttentionMask(mask.masked[:, :, position : position + 1], fully_masked, bias)
    row_attention = attention_pattern.compute_scores(
        kernel, (q[:, position : position + 1], k, v, prepared_mask, sink), None, row
    )
    values = row_attention.scores if suffix == "scores" else row_attention.pattern()
    return values[0, :, 0].float(), "HTS", shape


def _compute_position_values(
    inspector: Inspector, activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Return position information: an embedding vector, RoPE angles, or the bias on the scores."""
    if site_name.endswith("embed.token"):
        side = site_name.removesuffix("embed.token")
        token_ids = (
            activations.model_input.source
            if side == "encoder." and activations.model_input.source
            else activations.model_input.tokens
        )
        stack = inspector.sites[f"{side}embed"].stack
        assert stack is not None
        row = stack.embed.token.forward(torch.tensor([token_ids[position]], device=inspector.model.device))[0]
        return row.float(), "Td", (len(token_ids), len(row))
    if "embed." in site_name:
        if site_name not in activations.position_outputs:
            raise InputError("this model has no position embedding; inspect position in its attention")
        value = activations.position_outputs[site_name][0]
        value = value if value.ndim == 2 else value[None]
        return value[min(position, len(value) - 1)].float(), "Td", tuple(value.shape)
    attention, prefix = site_name.removesuffix(".position"), site_name[: site_name.index("blocks.")]
    layer, stack = inspector.sites[f"{attention}.q"].layer, inspector.sites[f"{attention}.q"].stack
    assert stack is not None
    assert layer is not None
    rotation = activations.position_outputs.get(f"{prefix}{stack.layer_position_keys[layer]}")
    if rotation is not None:
        angles = torch.atan2(rotation.sin, rotation.cos)[0].squeeze(-2)
        return angles[min(position, len(angles) - 1)].float(), "TP", tuple(angles.shape)
    args = activations.attention_calls[attention][1]
    bias = attention_pattern.build_dense_mask(args).bias
    if bias is None:
        raise InputError("this layer's attention has no position information; inspect embed.position")
    heads, length, slots = args[0].shape[2], args[0].shape[1], args[1].shape[1]
    return bias.expand(1, heads, length, slots)[0, :, position].float(), "HTS", (heads, length, slots)


def final_norm_site(inspector: Inspector) -> str:
    return next(name for name in reversed(inspector.sites) if name.endswith("final_norm"))


def _logits_result(
    inspector: Inspector, activations: ActivationCache, query: Activation, site_name: str
) -> QueryResult:
    """Logits or probabilities over the vocabulary: top tokens and a histogram."""
    logits = inspector.logits(activations[final_norm_site(inspector)][query.position])
    values = logits if site_name == "logits" else logits.softmax(-1)
    top = values.topk(min(NUM_TOP_LOGITS, len(values)))
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values, NUM_HISTOGRAM_BINS, low, high) if high > low else torch.zeros(NUM_HISTOGRAM_BINS)
    length = len(query.input.tokens)
    data = {
        "site": site_name,
        "equation": site_equation(inspector.model, inspector.sites["logits"])
        if site_name == "logits"
        else "softmax(logits)",
        "formulas": list_formulas(inspector.model, site_name, inspector.sites),
        "axes": [
            {"letter": letter, "name": AXIS_NAMES[letter], "size": size}
            for letter, size in (("T", length), ("V", len(values)))
        ],
        "value_axes": "V",
        "python_code": build_snippet(inspector, query.input, site_name, query.position),
        "tokens": top.indices.tolist(),
        "token_strs": [inspector.tokenizer.decode_token(token) for token in top.indices.tolist()],
    }
    return QueryResult(data | _summarize_values(values), {"values": top.values, "histogram": counts})
