"""What heads look at: a wall of all of them, layer by layer, and one head from close by."""

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
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.model_input import ModelInput
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.activation import compute_attention_row
from cutaway.serve.inspect.queries.base import InputQuery, Query, TokenIndex

HEAD_TYPE_CACHE: WeakKeyDictionary[Inspector, QueryResult] = WeakKeyDictionary()
"""Kinds of heads of a model as it is, which take a few passes."""
HEAD_TYPE_BATCH_SIZE = 4
THUMBNAIL_SIZE = 48
"""Of a thumbnail's side at most: beyond it, a cell is the strongest of several."""
MAX_MATRIX_SIZE = 1024
"""Of one head's matrix, likewise."""
AttentionName = Annotated[str, Field(max_length=100)]


class AttentionLayers(Query):
    """Every attention of the model: its place, its heads, what it can see."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        return QueryResult(
            {
                "layers": [
                    _describe_attention(inspector, site) for site in inspector.sites.values() if site.kind == "pattern"
                ]
            }
        )


class AttentionThumbnails(InputQuery):
    """All heads of one attention, small."""

    attention: AttentionName

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, None, job)
        arrays = {
            "thumbnails": _max_pool(pattern, THUMBNAIL_SIZE),
            "visible": _max_pool(visible[None].float(), THUMBNAIL_SIZE)[0] > 0,
        }
        arrays |= {
            "entropy": pattern_entropy_by_query(pattern).mean(-1),
            "first_token_weight": _first_token_weight(pattern),
        }
        if sink is not None:
            arrays["sink_weight"] = sink.mean(-1)
        return QueryResult({"attention": self.attention, "shape": list(pattern.shape[1:])}, arrays)


class AttentionHead(InputQuery):
    """One head: who looks at whom, how much, and how widely each token looks."""

    attention: AttentionName
    head: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention, self.head)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, [self.head], job)
        arrays = {
            "pattern": _max_pool(pattern, MAX_MATRIX_SIZE)[0],
            "visible": _max_pool(visible[None].float(), MAX_MATRIX_SIZE)[0] > 0,
        }
        arrays |= {"entropy": pattern_entropy_by_query(pattern)[0]}
        facts = {"shape": list(pattern.shape[1:]), "mean_entropy": float(arrays["entropy"].mean())}
        facts |= {
            "first_token_weight": float(_first_token_weight(pattern)),
            "sink_weight": None if sink is None else float(sink.mean()),
        }
        if sink is not None:
            arrays["sink_weight"] = sink[0]
        return QueryResult(facts, arrays)


class AttentionRow(InputQuery):
    """Where one token of one head looks, exactly, however long the text is."""

    attention: AttentionName
    head: TokenIndex
    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        site = find_attention_site(inspector, self.attention, self.head)
        pattern, visible, sink = compute_pattern(inspector, self.input, site, [self.head], job)
        if self.position >= pattern.shape[1]:
            raise InputError(f"position is {self.position}; {pattern.shape[1]} tokens look here, from 0 on")
        facts = {"sink_weight": None if sink is None else float(sink[0, self.position])}
        return QueryResult(facts, {"weights": pattern[0, self.position], "visible": visible[self.position]})


def _describe_attention(inspector: Inspector, site: Site) -> dict[str, Any]:
    name = site.name.removesuffix(".pattern")
    side = next(side for side, stack in inspector.model.stacks.items() if stack is site.stack)
    cross = name.endswith(".cross")
    stack, layer = site.stack, site.layer
    assert stack is not None
    assert layer is not None
    block: Any = stack.blocks[layer]
    f = (block.cross if cross else block.attn).f
    return {
        "name": name,
        "stack": side,
        "is_cross_attention": cross,
        "layer": layer,
        "heads": site.num_heads,
        "kv_heads": dict(site.axis_sizes)["G"],
        "window": None if cross else stack.windows[layer],
        "is_causal": stack.causal and not cross,
        "has_sink": getattr(f, "sink", None) is not None,
    }


def find_attention_site(inspector: Inspector, attention: str, head: int | None = None) -> Site:
    site = inspector.sites.get(f"{attention}.pattern")
    if site is None:
        names = [name.removesuffix(".pattern") for name in inspector.sites if name.endswith(".pattern")]
        raise InputError(f"'{attention}' is no attention of this model; there is {', '.join(names[:4])} …")
    if head is not None and head >= (site.num_heads or 0):
        raise InputError(f"head is {head}; {attention} has the heads 0 to {(site.num_heads or 0) - 1}")
    return site


def compute_pattern(
    inspector: Inspector, model_input: ModelInput, site: Site, heads: list[int] | None, job: QueryJob
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Patterns (H, T, S) in fp32, what the mask lets be seen (T, S), and what a sink takes (H, T), if there is one."""
    name = site.name.removesuffix(".pattern")
    kept = inspector.get_activations_at(model_input, [f"{name}.{part}" for part in "qkv"], job)
    if name not in kept.attention_calls:
        raise InputError(f"{name} is passed by in this model as it was changed; choose a layer that is not skipped")
    with torch.no_grad():
        found = kept.recompute_attention(name, heads)
        visible = (found.scores[0] != -torch.inf).any(0)
        if _has_edited_pattern(inspector, model_input, name):  # what was put there cannot be made from q and k
            with inspector.edited_model(model_input), trace(inspector.model, site.name, heads=heads) as t:
                inspector.last_hidden_state(model_input)
            pattern = upcast_float32(t[site.name])[0]
        else:
            pattern = upcast_float32(found.pattern())[0]
    sink = None if found.sink is None else (1 - pattern.sum(-1)).clamp(min=0)
    return pattern, visible, sink


def _has_edited_pattern(inspector: Inspector, model_input: ModelInput, attention: str) -> bool:
    """Whether its scores or its pattern are changed themselves."""
    own = {f"{attention}.scores", f"{attention}.pattern"}
    return bool(model_input.edits) and any(
        site.name in own for _, site, _ in edit(inspector.model, model_input.edits).value_edits
    )


def _max_pool(values: Tensor, max_size: int) -> Tensor:
    """(H, T, S), or the strongest of several where an axis is longer than `max_size`."""
    size = [min(extent, max_size) for extent in values.shape[-2:]]
    return values if size == list(values.shape[-2:]) else F.adaptive_max_pool2d(values, size)


def _first_token_weight(pattern: Tensor) -> Tensor:
    """What each head spends on the first token, where heads rest, averaged over those that come after it."""
    later = pattern[:, 1:, 0]
    return later.mean(-1) if later.shape[-1] else pattern[:, :, 0].mean(-1)


class AttentionByLayer(InputQuery):
    """For each layer, how much a token takes from each other one: its row of the pattern, averaged over heads."""

    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        kept = inspector.get_activations_at(self.input, [name for name in inspector.sites if name.endswith(".q")], job)
        at = inspector.check_position(self.input, self.position)
        rows: dict[str, list[Tensor]] = {"attn": [], "cross": []}
        writer = inspector.output_stack
        with inspector.lock, torch.no_grad():
            for name in kept.attention_calls:
                if inspector.sites[f"{name}.q"].stack is writer:
                    row = compute_attention_row(kept, f"{name}.pattern", at)[0].mean(0)
                    rows[name.rsplit(".", 1)[-1]].append(row)
        return QueryResult({}, {kind: torch.stack(found) for kind, found in rows.items() if found})


class HeadTypes(Query):
    """How much of its attention each head spends by each rule, on random tokens that are then repeated."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        if inspector not in HEAD_TYPE_CACHE:
            with inspector.edited_model(ModelInput(tokens=(0,))):
                found = head_scores(
                    SimpleNamespace(model=inspector.model, tokenizer=inspector.tokenizer.tokenizer),
                    batch_size=HEAD_TYPE_BATCH_SIZE,
                )
            names = [f"blocks.{layer}.attn" for layer in found.labels[0]]
            HEAD_TYPE_CACHE[inspector] = QueryResult(
                {"head_types": list(HEAD_TYPES), "attention_names": names, "note": found.note}, {"scores": found.values}
            )
        return HEAD_TYPE_CACHE[inspector]
