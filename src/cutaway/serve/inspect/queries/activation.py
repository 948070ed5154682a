"""One stage of a token's way: its formula, its axes, its values, and how to get them in Python."""

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.equations import site_equation
from cutaway.lens.sites import Site
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.formulas import list_formulas
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex
from cutaway.serve.inspect.snippet import build_snippet

AXIS_NAMES = {
    "T": "tokens", "S": "key positions", "H": "heads", "G": "KV heads", "D": "head dim", "E": "value head dim",
    "d": "d_model", "h": "FFN hidden size", "V": "vocabulary", "K": "top-k experts", "P": "rotary pairs",
}  # fmt: skip
NUM_TOP_LOGITS = 50
"""Of a vocabulary, the likeliest."""
NUM_HISTOGRAM_BINS = 60


class Activation(InputQuery):
    """A site, or what has no site of its own: `embed.token`, `….attn.position`, `….attn.mask`, `softmax`."""

    site: Annotated[str, Field(max_length=80)]
    position: TokenIndex
    source_position: TokenIndex = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        name, at = self.site, self.position
        beside = name.startswith("encoder.") and len(inspector.model.stacks) > 1
        where = self.source_position if beside or (".cross." in name and name.endswith((".k", ".v"))) else at
        text = (self.input.source or ()) if where is not at or beside else self.input.tokens
        if where >= len(text):
            raise InputError(f"the text has {len(text)} tokens, and place {where} is none of them")
        if name in ("logits", "softmax"):
            return _logits_result(
                inspector, inspector.get_activations_at(self.input, [final_norm_site(inspector)], job), self, name
            )
        whole, _, end = name.rpartition(".")
        needed = f"{whole}.q" if end in ("scores", "pattern", "mask", "position") else name
        needed = whole if end in ("token", "position") and whole.endswith("embed") else needed
        if needed not in inspector.sites:
            raise InputError(f"'{name}' is no stage of this model; it has {', '.join(list(inspector.sites)[:4])} …")
        kept = inspector.get_activations_at(self.input, [needed], job)
        with inspector.lock, torch.no_grad():
            values, axes, shape = _read_activation(inspector, kept, name, where)
        site = inspector.sites.get(name)
        facts: dict[str, Any] = {
            "site": name,
            "equation": "" if site is None else site_equation(inspector.model, site),
            "formulas": list_formulas(inspector.model, name, inspector.sites),
            "axes": [
                {"letter": letter, "name": AXIS_NAMES[letter], "size": size}
                for letter, size in zip(axes, shape, strict=True)
            ],
            "value_axes": _token_axes(axes),
            "python_code": build_snippet(inspector, self.input, name, where),
        }
        hidden = values == -torch.inf
        seen = values.masked_fill(hidden, 0.0) if hidden.any() else values
        arrays = {"values": seen} | ({"masked": hidden} if hidden.any() else {})
        return QueryResult(facts | _summarize_values(values), arrays)


def _token_axes(axes: str) -> str:
    """Those that the values of one token have."""
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
    """The chosen token's values, with the axes and the shape of the whole."""
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
    """What the token sees: heads × tokens looked at."""
    attention, _, what = site_name.rpartition(".")
    kernel, args = activations.attention_calls[attention]
    q, k, v, plan, sink = attention_pattern.unpack_kernel_args(args)
    mask = attention_pattern.build_dense_mask(args)
    shape = (q.shape[2], q.shape[1], k.shape[1])
    if what == "mask":
        hidden = mask.masked[0, :, position].expand(q.shape[2], -1)
        return torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, -torch.inf), "HTS", shape
    blind = None if mask.fully_masked is None else mask.fully_masked[:, :, position : position + 1]
    bias = None if mask.bias is None else mask.bias[:, :, position : position + 1]
    row = attention_pattern.AttentionMask(mask.masked[:, :, position : position + 1], blind, bias)
    seen = attention_pattern.compute_scores(kernel, (q[:, position : position + 1], k, v, plan, sink), None, row)
    values = seen.scores if what == "scores" else seen.pattern()
    return values[0, :, 0].float(), "HTS", shape


def _compute_position_values(
    inspector: Inspector, activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """What says where a token stands: a vector beside its own, angles, or what is added to its scores."""
    if site_name.endswith("embed.token"):
        side = site_name.removesuffix("embed.token")
        text = (
            activations.model_input.source
            if side == "encoder." and activations.model_input.source
            else activations.model_input.tokens
        )
        stack = inspector.sites[f"{side}embed"].stack
        assert stack is not None
        row = stack.embed.token.forward(torch.tensor([text[position]], device=inspector.model.device))[0]
        return row.float(), "Td", (len(text), len(row))
    if "embed." in site_name:
        if site_name not in activations.position_outputs:
            raise InputError("this model adds no positions to its embedding; see position in its attention")
        value = activations.position_outputs[site_name][0]
        value = value if value.ndim == 2 else value[None]
        return value[min(position, len(value) - 1)].float(), "Td", tuple(value.shape)
    attention, prefix = site_name.removesuffix(".position"), site_name[: site_name.index("blocks.")]
    layer, stack = inspector.sites[f"{attention}.q"].layer, inspector.sites[f"{attention}.q"].stack
    assert stack is not None
    assert layer is not None
    turned = activations.position_outputs.get(f"{prefix}{stack.layer_position_keys[layer]}")
    if turned is not None:
        angles = torch.atan2(turned.sin, turned.cos)[0].squeeze(-2)
        return angles[min(position, len(angles) - 1)].float(), "TP", tuple(angles.shape)
    args = activations.attention_calls[attention][1]
    bias = attention_pattern.build_dense_mask(args).bias
    if bias is None:
        raise InputError("nothing in this layer's attention says where a token stands; it may come with the embedding")
    heads, length, slots = args[0].shape[2], args[0].shape[1], args[1].shape[1]
    return bias.expand(1, heads, length, slots)[0, :, position].float(), "HTS", (heads, length, slots)


def final_norm_site(inspector: Inspector) -> str:
    return next(name for name in reversed(inspector.sites) if name.endswith("final_norm"))


def _logits_result(
    inspector: Inspector, activations: ActivationCache, query: Activation, site_name: str
) -> QueryResult:
    """The whole vocabulary: its likeliest tokens, and how all of its numbers lie."""
    logits = inspector.logits(activations[final_norm_site(inspector)][query.position])
    values = logits if site_name == "logits" else logits.softmax(-1)
    best = values.topk(min(NUM_TOP_LOGITS, len(values)))
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values, NUM_HISTOGRAM_BINS, low, high) if high > low else torch.zeros(NUM_HISTOGRAM_BINS)
    length = len(query.input.tokens)
    facts = {
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
        "tokens": best.indices.tolist(),
        "token_strs": [inspector.tokenizer.decode_token(token) for token in best.indices.tolist()],
    }
    return QueryResult(facts | _summarize_values(values), {"values": best.values, "histogram": counts})
