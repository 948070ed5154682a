"""Query: the activation of one token at one site, with formula, axes, statistics and Python snippet."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import attention_pattern
from cutaway.lens.equations import site_equation
from cutaway.lens.sites import AXIS_NAMES
from cutaway.model.rope import Rotation
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.formulas import list_formulas
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.snippet import build_snippet
from cutaway.serve.inspect.stage_sentences import StageInputs, describe_logits, describe_stage

NUM_TOP_LOGITS = 50
"""Number of largest logits that are returned."""
NUM_HISTOGRAM_BINS = 60


class Activation(InputQuery):
    """One token's activation at a site, with its formulas, axes, statistics and a Python snippet.

    The query also accepts names that are not sites: `embed.token`, `embed.position`, `….attn.position`,
    `….attn.mask`, `softmax`.
    """

    site: Annotated[str, Field(max_length=80)]
    position: TokenIndex
    source_position: TokenIndex = 0

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        name = self.site
        is_encoder = name.startswith("encoder.") and len(inspector.model.stacks) > 1
        reads_source = is_encoder or (".cross." in name and name.endswith((".k", ".v")))
        token_index = self.source_position if reads_source else self.position
        token_ids = (self.input.source or ()) if reads_source else self.input.tokens
        check_position(token_index, token_ids)
        if name in ("logits", "softmax"):
            activations = inspector.get_activations_at(self.input, [final_norm_site(inspector)], job)
            return _logits_result(inspector, activations, self, name)
        parent, _, suffix = name.rpartition(".")
        cached_site = f"{parent}.q" if suffix in ("scores", "pattern", "mask", "position") else name
        cached_site = parent if suffix in ("token", "position") and parent.endswith("embed") else cached_site
        inspector.check_site(cached_site)
        activations = inspector.get_activations_at(self.input, [cached_site], job)
        with inspector.lock, torch.no_grad():
            values, axes, shape = _read_activation(inspector, activations, name, token_index)
        site = inspector.sites.get(name)
        equation = "" if site is None else site_equation(inspector.model, site)
        data = _describe_values(inspector, self.input, name, token_index, equation, axes, shape, values)
        with torch.no_grad():
            data["sentence"] = describe_stage(StageInputs(inspector, activations, name, token_index, values))
        masked = values == -torch.inf
        tensors = {"values": values.masked_fill(masked, 0.0), "masked": masked} if masked.any() else {"values": values}
        return QueryResult(data, tensors)


def _describe_values(
    inspector: Inspector,
    model_input: ModelInput,
    site_name: str,
    position: int,
    equation: str,
    axes: str,
    shape: tuple[int, ...],
    values: Tensor,
) -> dict[str, object]:
    """Return formulas, axes, Python snippet and statistics of one token's values as JSON values.

    `axes` and `shape` describe the activation of all tokens.
    """
    finite = values[values.isfinite()].float()
    finite = finite if len(finite) else torch.zeros(1)
    named_axes = [(letter, AXIS_NAMES[letter], size) for letter, size in zip(axes, shape, strict=True)]
    return {
        "site": site_name,
        "equation": equation,
        "formulas": list_formulas(inspector.model, site_name, inspector.sites),
        "axes": [{"letter": letter, "name": name, "size": size} for letter, name, size in named_axes],
        "value_axes": axes.replace("T" if "T" in axes else "S", ""),  # keys and values have the axis S instead of T
        "python_code": build_snippet(inspector, model_input, site_name, position),
        "norm": float(finite.norm()),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(finite.mean()),
    }


def _read_activation(
    inspector: Inspector, activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Return one token's values at a site, and the axes and shape of the activation of all tokens."""
    if site_name.endswith((".scores", ".pattern", ".mask")):
        return compute_attention_row(activations, site_name, position)
    if site_name.endswith(".position") or site_name.endswith("embed.token"):
        return compute_position_values(inspector, activations, site_name, position)
    value, axes = activations.values[site_name], inspector.sites[site_name].axes
    value, axes = (value, "TK") if axes == "NK" else (value[0], axes[1:])
    return value[position].float(), axes, tuple(value.shape)


def compute_attention_row(
    activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Recompute the scores, pattern or mask (H, S) of the query token at `position`.

    Also return the axes and shape of the rows of all query tokens.
    """
    attention, _, suffix = site_name.rpartition(".")
    kernel, args = activations.attention_calls[attention]
    q, k, v, prepared_mask, sink = attention_pattern.unpack_kernel_args(args)
    mask = attention_pattern.build_dense_mask(args)
    shape = (q.shape[2], q.shape[1], k.shape[1])
    if suffix == "mask":
        masked = mask.masked[0, :, position].expand(q.shape[2], -1)
        return torch.zeros_like(masked, dtype=torch.float32).masked_fill(masked, -torch.inf), "HTS", shape
    query = slice(position, position + 1)
    fully_masked = None if mask.fully_masked is None else mask.fully_masked[:, :, query]
    bias = None if mask.bias is None else mask.bias[:, :, query]
    row = attention_pattern.AttentionMask(mask.masked[:, :, query], fully_masked, bias)
    row_attention = attention_pattern.compute_scores(kernel, (q[:, query], k, v, prepared_mask, sink), None, row)
    values = row_attention.scores if suffix == "scores" else row_attention.pattern()
    return values[0, :, 0].float(), "HTS", shape


def compute_position_values(
    inspector: Inspector, activations: ActivationCache, site_name: str, position: int
) -> tuple[Tensor, str, tuple[int, ...]]:
    """Return one token's token embedding, position embedding, RoPE angles or attention bias.

    Also return the axes and shape of these values for all tokens.
    """
    if site_name.endswith("embed.token"):
        side, model_input = site_name.removesuffix("embed.token"), activations.model_input
        token_ids = model_input.source if side == "encoder." and model_input.source else model_input.tokens
        stack = inspector.sites[f"{side}embed"].stack
        assert stack is not None
        row = stack.embed.token.forward(torch.tensor([token_ids[position]], device=inspector.model.device))[0]
        return row.float(), "Td", (len(token_ids), len(row))
    if "embed." in site_name:
        if site_name not in activations.position_outputs:
            raise InputError("this model has no position embedding; inspect attn.position of a layer")
        value = activations.position_outputs[site_name][0]
        value = value if value.ndim == 2 else value[None]
        return value[min(position, len(value) - 1)].float(), "Td", tuple(value.shape)
    attention, prefix = site_name.removesuffix(".position"), site_name[: site_name.index("blocks.")]
    layer, stack = inspector.sites[f"{attention}.q"].layer, inspector.sites[f"{attention}.q"].stack
    assert stack is not None
    assert layer is not None
    rotation = activations.position_outputs.get(f"{prefix}{stack.layer_position_keys[layer]}")
    if isinstance(rotation, Rotation):
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
    """Return the top tokens at the query's position, and a histogram of the logits or probabilities of all tokens."""
    logits = inspector.logits(activations[final_norm_site(inspector)][query.position])
    values = logits if site_name == "logits" else logits.softmax(-1)
    top = values.topk(min(NUM_TOP_LOGITS, len(values)))
    low, high = float(values.min()), float(values.max())
    counts = torch.histc(values, NUM_HISTOGRAM_BINS, low, high) if high > low else torch.zeros(NUM_HISTOGRAM_BINS)
    is_logits, shape = site_name == "logits", (len(query.input.tokens), len(values))
    equation = site_equation(inspector.model, inspector.sites["logits"]) if is_logits else "softmax(logits)"
    data = _describe_values(inspector, query.input, site_name, query.position, equation, "TV", shape, values)
    tokens = top.indices.tolist()
    token_strs = [inspector.tokenizer.decode_token(token) for token in tokens]
    sentence = describe_logits(values, token_strs, is_logits=is_logits)
    data |= {"tokens": tokens, "token_strs": token_strs, "sentence": sentence}
    return QueryResult(data, {"values": top.values, "histogram": counts})
