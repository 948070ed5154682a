"""Queries: activation patching between two texts, as a map over layers and tokens or heads, and of chosen patches."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal
from weakref import WeakKeyDictionary

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cutaway.errors import InputError
from cutaway.lens.analysis.patched_logits import Patch, PositionPairs, patched_logits, resumed_sites
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.patching_snippet import build_patching_snippet
from cutaway.serve.inspect.queries.base import QueryJob, QueryResult, TokenIndex
from cutaway.serve.inspect.queries.patching_metric import Metric, MetricQuery, find_patching_problem
from cutaway.serve.inspect.queries.text_pair import (
    TextPair,
    analysis_inputs,
    both_activations,
    describe_top_tokens,
)

MAX_SHORT_TOKENS = 64
"""In longer texts only the tokens from the first difference on are patched."""
MAX_FAST_FLOPS = 3e11
"""A map that takes at most this number of FLOPs is measured without being requested."""
MAX_PATCHES = 64
MAP_CACHE: WeakKeyDictionary[ActivationCache, dict[str, QueryResult]] = WeakKeyDictionary()
"""Activation cache of the receiver run → finished maps by query. An entry is removed with its activation cache."""

Component = Literal["resid", "attn.out", "cross.out", "ffn.out", "attn.z", "cross.z"]
COMPONENTS: tuple[Component, ...] = ("resid", "attn.out", "cross.out", "ffn.out", "attn.z", "cross.z")


def list_patch_maps(inspector: Inspector, pair: TextPair) -> list[dict[str, str]]:
    """Stack and component of each map: those of the model whose stack has aligned tokens.

    The encoder of an encoder-decoder is first.
    """
    stacks = [name for name in inspector.model.stacks if pair.pairs(is_source=_is_source(inspector, name))]
    maps = [(stack, component) for stack in stacks for component in COMPONENTS]
    return [{"stack": s, "component": c} for s, c in maps if map_sites(inspector, s, c)]


def map_sites(inspector: Inspector, stack: str, component: Component) -> list[str]:
    """Sites of a component by layer. The residual stream has one more row, after the last block."""
    prefix = f"{stack}." if len(inspector.model.stacks) > 1 else ""
    layers = range(len(inspector.model.stacks[stack].blocks))
    suffix = "resid_pre" if component == "resid" else component
    names = [f"{prefix}blocks.{layer}.{suffix}" for layer in layers]
    if component == "resid":
        names.append(f"{prefix}blocks.{len(layers) - 1}.resid_post")
    return [name for name in names if name in inspector.sites]


def _is_source(inspector: Inspector, stack: str) -> bool:
    """Whether the input of a stack is the source of an encoder-decoder."""
    return stack == "encoder" and len(inspector.model.stacks) > 1


def is_fast(inspector: Inspector, pair: TextPair) -> bool:
    """Whether a map over layers and tokens takes few FLOPs, by the rule 2·parameters·tokens per forward pass."""
    num_parameters = sum(parameter.numel() for parameter in inspector.model.parameters())
    num_tokens, num_layers = len(pair.clean.tokens) + len(pair.clean.source or ()), len(inspector.output_stack.blocks)
    # On average, a forward pass that restarts at the block of the patch runs half of the blocks.
    return num_parameters * num_tokens * len(pair.token_pairs + pair.source_pairs) * num_layers <= MAX_FAST_FLOPS


class PatchingQuery(MetricQuery):
    """Query about patches between two texts. With `reverse`, activations of the changed run go into the clean run."""

    reverse: bool = False

    def prepare(self, inspector: Inspector, job: QueryJob) -> tuple[TextPair, Metric]:
        pair = self.text_pair()
        metric = self.choose_metric(inspector, pair, job)
        if problem := find_patching_problem(pair, metric):
            raise InputError(problem)
        return pair, metric

    def run_patches(
        self,
        inspector: Inspector,
        pair: TextPair,
        patch_sets: list[list[Patch]],
        job: QueryJob,
    ) -> Tensor:
        """Return the logits of the receiver run with each set of patches, (patch sets, V)."""
        names = {patch.site for patches in patch_sets for patch in patches}
        names |= set(resumed_sites(analysis_inputs(inspector, pair.clean)))
        clean, changed = both_activations(inspector, pair, sorted(names), job)
        donor, receiver = (changed, clean) if self.reverse else (clean, changed)
        position = pair.position if self.reverse else pair.changed_position
        with inspector.edited_model(receiver.model_input):
            return patched_logits(
                analysis_inputs(inspector, receiver.model_input),
                receiver.values,
                donor.values,
                patch_sets,
                position,
                job.check_cancelled,
            )

    def orient(self, pairs: list[tuple[int, int]]) -> PositionPairs:
        """Pairs of positions (clean, changed) as pairs (donor, receiver)."""
        return tuple((changed, clean) if self.reverse else (clean, changed) for clean, changed in pairs)


class ActivationPatching(PatchingQuery):
    """Share of the metric's change that is restored by copying one activation: layer × token, or layer × head.

    The head outputs `z` are copied at all aligned positions, or with `at_position` only at the selected position.
    Rows are sent as they are measured; rows that are not measured yet, and heads that a layer does not have, are NaN.
    """

    stack: Literal["encoder", "decoder"]
    component: Component
    at_position: bool = False

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair, metric = self.prepare(inspector, job)
        if self.stack not in inspector.model.stacks or not map_sites(inspector, self.stack, self.component):
            raise InputError(f"this model has no {self.component} in the {self.stack}; choose another component")
        if not pair.pairs(is_source=_is_source(inspector, self.stack)):
            problem = f"the inputs of the {self.stack} share no aligned tokens, so no activation can be copied"
            raise InputError(f"{problem}; choose a map of another stack, or use the same text with one word changed")
        receiver = inspector.get_activations(self.input if self.reverse else self.changed, job)
        finished, key = MAP_CACHE.setdefault(receiver, {}), self.model_dump_json()
        if key not in finished:
            for result in self._measure_rows(inspector, pair, metric, job):
                job.send_partial(result)
            finished[key] = result
        return finished[key]

    def _measure_rows(
        self, inspector: Inspector, pair: TextPair, metric: Metric, job: QueryJob
    ) -> Iterator[QueryResult]:
        names = map_sites(inspector, self.stack, self.component)
        is_source = _is_source(inspector, self.stack)
        pairs = _shown_pairs(pair, is_source=is_source)
        by_head = self.component.endswith(".z")
        num_columns = max(inspector.sites[name].num_heads or 0 for name in names) if by_head else len(pairs)
        shares = torch.full((len(names), num_columns), math.nan)
        data = {"sites": names, "pairs": pairs, "by_head": by_head}
        selected = [(pair.position, pair.changed_position)] if self.at_position else pair.pairs(is_source=is_source)
        for row, name in enumerate(names):
            job.report_progress(row, len(names), "layers")
            if by_head:
                heads = range(inspector.sites[name].num_heads or 0)
                patch_sets = [[Patch(name, self.orient(selected), head)] for head in heads]
            else:
                patch_sets = [[Patch(name, self.orient([shown]))] for shown in pairs]
            logits = self.run_patches(inspector, pair, patch_sets, job)
            shares[row, : len(patch_sets)] = metric.restored_share(logits, reverse=self.reverse).cpu()
            yield QueryResult(data | {"completed": row + 1}, {"shares": shares.clone()})


def _shown_pairs(pair: TextPair, *, is_source: bool) -> list[tuple[int, int]]:
    """Aligned positions that are patched: all of a short text, those from the first difference on of a long one."""
    pairs = pair.pairs(is_source=is_source)
    if len(pairs) <= MAX_SHORT_TOKENS:
        return pairs
    first = next((index for index, both in enumerate(pairs) if not pair.is_equal(both, is_source=is_source)), 0)
    return pairs[first:]


class PatchSpec(BaseModel):
    """One patch of the page: a site, a token of the clean text (None: all aligned tokens) and a head (None: all)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    site: Annotated[str, Field(max_length=100)]
    position: TokenIndex | None = None
    head: TokenIndex | None = None


class PatchEffect(PatchingQuery):
    """Top tokens and metric with chosen patches, the restored share, and Python code that reproduces the metric."""

    patches: Annotated[tuple[PatchSpec, ...], Field(max_length=MAX_PATCHES)]

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair, metric = self.prepare(inspector, job)
        patches = [self._resolve(inspector, pair, spec) for spec in self.patches]
        logits = self.run_patches(inspector, pair, [patches], job)[0]
        data = {
            "top_tokens": describe_top_tokens(inspector, logits),
            "metric": float(metric.measure(logits)),
            "share": float(metric.restored_share(logits, reverse=self.reverse)),
            "python_code": build_patching_snippet(
                inspector,
                *((self.changed, self.input) if self.reverse else (self.input, self.changed)),
                patches,
                pair.position if self.reverse else pair.changed_position,
                metric.answer_token,
                metric.incorrect_token,
            ),
        }
        return QueryResult(data)

    def _resolve(self, inspector: Inspector, pair: TextPair, spec: PatchSpec) -> Patch:
        inspector.check_site(spec.site)
        site = inspector.sites[spec.site]
        if not site.axes.startswith("BT") or site.layer is None:
            raise InputError(f"'{spec.site}' cannot be patched by token; use resid_pre, attn.out, ffn.out or attn.z")
        if spec.head is not None and ("H" not in site.axes or spec.head >= (site.num_heads or 0)):
            raise InputError(f"{spec.site} has no head {spec.head}; use attn.z, with heads from 0")
        is_source = spec.site.startswith("encoder.")
        pairs = pair.pairs(is_source=is_source)
        if spec.position is None and not pairs:
            raise InputError(f"{spec.site} has no aligned tokens, so none can be copied; remove this patch")
        if spec.position is not None:
            pairs = [both for both in pairs if both[0] == spec.position]
            if not is_source and spec.position == pair.position:
                pairs = [(pair.position, pair.changed_position)]
        if not pairs:
            raise InputError(f"token {spec.position} has no counterpart in the changed text; patch an aligned token")
        return Patch(spec.site, self.orient(pairs), spec.head)
