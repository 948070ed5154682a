"""Queries: attention patterns of all layers, of one layer, head or query, and head-type scores."""

from types import SimpleNamespace
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens import edit, trace
from cutaway.lens.analysis import head_scores
from cutaway.lens.analysis.attention_heads import HEAD_TYPES, pattern_entropy_by_query
from cutaway.lens.analysis.inputs import upcast_float32
from cutaway.lens.sites import Site
from cutaway.serve.inspect.inspector import check_position
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.queries.activation import compute_attention_row
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, Query, QueryJob, QueryResult, TokenIndex

HEAD_TYPE_CACHE: WeakKeyDictionary[Inspector, QueryResult] = WeakKeyDictionary()
"""Head-type scores of the unedited model. They are cached because they take several forward passes."""
HEAD_TYPE_BATCH_SIZE = 4
THUMBNAIL_SIZE = 48
"""Maximum number of rows and columns of a thumbnail. Larger patterns are max-pooled."""
MAX_MATRIX_SIZE = 1024
"""Maximum number of rows and columns of one head's pattern. Larger patterns are max-pooled."""
AttentionName = Annotated[str, Field(max_length=100)]


class AttentionLayers(Query):
    """Layer, number of heads, sliding window, causality and sink of each attention module."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        sites = [site for site in inspector.sites.values() if site.kind == "pattern"]
        return QueryResult({"layers": [_describe_attention(inspector, site) for site in sites]})


class AttentionThumbnails(InputQuery):
    """Thumbnails of the attention patterns of all heads of one attention module."""

    attention: AttentionName

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, None, job)
        tensors = {
            "thumbnails": _max_pool(pattern, THUMBNAIL_SIZE),
            "visible": _max_pool(visible[None].float(), THUMBNAIL_SIZE)[0] > 0,
            "entropy": pattern_entropy_by_query(pattern).mean(-1),
            "first_token_weight": _first_token_weight(pattern),
        }
        if sink is not None:
            tensors["sink_weight"] = sink.mean(-1)
        return QueryResult({"attention": self.attention, "shape": list(pattern.shape[1:])}, tensors)


class AttentionHead(InputQuery):
    """Attention pattern of one head, max-pooled if it is large, and its entropy per query token."""

    attention: AttentionName
    head: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention, self.head)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, [self.head], job)
        tensors = {
            "pattern": _max_pool(pattern, MAX_MATRIX_SIZE)[0],
            "visible": _max_pool(visible[None].float(), MAX_MATRIX_SIZE)[0] > 0,
            "entropy": pattern_entropy_by_query(pattern)[0],
        }
        data = {
            "shape": list(pattern.shape[1:]),
            "mean_entropy": float(tensors["entropy"].mean()),
            "first_token_weight": float(_first_token_weight(pattern)),
            "sink_weight": None if sink is None else float(sink.mean()),
        }
        if sink is not None:
            tensors["sink_weight"] = sink[0]
        return QueryResult(data, tensors)


class AttentionRow(InputQuery):
    """Attention weights of one query token in one head, without pooling."""

    attention: AttentionName
    head: TokenIndex
    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention, self.head)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, [self.head], job)
        if self.position >= pattern.shape[1]:
            raise InputError(f"position is {self.position}, but the query positions are 0 to {pattern.shape[1] - 1}")
        data = {"sink_weight": None if sink is None else float(sink[0, self.position])}
        return QueryResult(data, {"weights": pattern[0, self.position], "visible": visible[self.position]})


def _describe_attention(inspector: Inspector, site: Site) -> dict[str, object]:
    name = site.name.removesuffix(".pattern")
    side = next(side for side, stack in inspector.model.stacks.items() if stack is site.stack)
    is_cross = name.endswith(".cross")
    stack, layer = site.stack, site.layer
    assert stack is not None
    assert layer is not None
    block: Any = stack.blocks[layer]
    module = (block.cross if is_cross else block.attn).f
    return {
        "name": name,
        "stack": side,
        "is_cross_attention": is_cross,
        "layer": layer,
        "heads": site.num_heads,
        "kv_heads": dict(site.axis_sizes)["G"],
        "window": None if is_cross else stack.windows[layer],
        "is_causal": stack.causal and not is_cross,
        "has_sink": getattr(module, "sink", None) is not None,
    }


def find_attention_site(inspector: Inspector, attention: str, head: int | None = None) -> Site:
    site = inspector.sites.get(f"{attention}.pattern")
    if site is None:
        names = [name.removesuffix(".pattern") for name in inspector.sites if name.endswith(".pattern")]
        raise InputError(f"'{attention}' is not an attention of this model; use one of {', '.join(names[:4])} …")
    if head is not None and head >= (site.num_heads or 0):
        raise InputError(f"head is {head}; {attention} has heads 0 to {(site.num_heads or 0) - 1}")
    return site


def compute_pattern(
    inspector: Inspector, model_input: ModelInput, site: Site, heads: list[int] | None, job: QueryJob
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the fp32 patterns (H, T, S), whether each key is visible (T, S), and the sink weights (H, T) or None."""
    name = site.name.removesuffix(".pattern")
    activations = inspector.get_activations_at(model_input, [f"{name}.{part}" for part in "qkv"], job)
    if name not in activations.attention_calls:
        raise InputError(f"{name} is skipped by the edits of this input; choose a layer that is not skipped")
    with torch.no_grad():
        attention = activations.recompute_attention(name, heads)
        visible = (attention.scores[0] != -torch.inf).any(0)
        if has_edited_pattern(inspector, model_input, name):  # an edited pattern cannot be recomputed from q and k
            with inspector.edited_model(model_input), trace(inspector.model, site.name, heads=heads) as t:
                inspector.last_hidden_state(model_input)
            pattern = upcast_float32(t[site.name])[0]
        else:
            pattern = upcast_float32(attention.pattern())[0]
    sink = None if attention.sink is None else (1 - pattern.sum(-1)).clamp(min=0)
    return pattern, visible, sink


def has_edited_pattern(inspector: Inspector, model_input: ModelInput, attention: str) -> bool:
    """Whether the input's edits change the scores or the pattern of the attention module named `attention`."""
    site_names = {f"{attention}.scores", f"{attention}.pattern"}
    return bool(model_input.edits) and any(
        site.name in site_names for _, site, _ in edit(inspector.model, model_input.edits).value_edits
    )


def _max_pool(values: Tensor, max_size: int) -> Tensor:
    """Max-pool a tensor (H, T, S) such as a pattern, so that T and S are at most `max_size`."""
    size = [min(extent, max_size) for extent in values.shape[-2:]]
    return values if size == list(values.shape[-2:]) else F.adaptive_max_pool2d(values, size)


def _first_token_weight(pattern: Tensor) -> Tensor:
    """Return each head's mean attention weight on the first token, averaged over all later query tokens: (H,)."""
    later = pattern[:, 1:, 0]
    return later.mean(-1) if later.shape[-1] else pattern[:, :, 0].mean(-1)


class AttentionByLayer(InputQuery):
    """Attention weights of one query token in each layer, averaged over heads: (layers, keys).

    The weights of a layer that an edit skips are zero.
    """

    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        query_sites = [name for name in inspector.sites if name.endswith(".q")]
        activations = inspector.get_activations_at(self.input, query_sites, job)
        position = check_position(self.position, self.input.tokens)
        rows: dict[str, dict[int, Tensor]] = {"attn": {}, "cross": {}}
        output_stack = inspector.output_stack
        with inspector.lock, torch.no_grad():
            for name in activations.attention_calls:
                site = inspector.sites[f"{name}.q"]
                if site.stack is output_stack and site.layer is not None:
                    row = compute_attention_row(activations, f"{name}.pattern", position)[0].mean(0)
                    rows[name.rsplit(".", 1)[-1]][site.layer] = row
        layers = range(len(output_stack.blocks))
        stacked = {
            kind: torch.stack(
                [by_layer.get(layer, torch.zeros_like(next(iter(by_layer.values())))) for layer in layers]
            )
            for kind, by_layer in rows.items()
            if by_layer
        }
        return QueryResult({}, stacked)


class HeadTypes(Query):
    """Scores of all heads for each head type (such as induction or previous token), on repeated random tokens."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if inspector not in HEAD_TYPE_CACHE:
            with inspector.edited_model(ModelInput(tokens=(0,))):
                scores = head_scores(
                    SimpleNamespace(model=inspector.model, tokenizer=inspector.tokenizer.tokenizer),
                    batch_size=HEAD_TYPE_BATCH_SIZE,
                )
            names = [f"blocks.{layer}.attn" for layer in scores.labels[0]]
            HEAD_TYPE_CACHE[inspector] = QueryResult(
                {"head_types": list(HEAD_TYPES), "attention_names": names, "note": scores.note},
                {"scores": scores.values},
            )
        return HEAD_TYPE_CACHE[inspector]
