"""Queries: the predictions for two texts, and the differences of their residual streams and attention patterns."""

import torch
from torch import Tensor

from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.queries.activation import compute_attention_row
from cutaway.serve.inspect.queries.activation_patching import is_fast, list_patch_maps
from cutaway.serve.inspect.queries.base import QueryJob, QueryResult
from cutaway.serve.inspect.queries.patching_metric import Metric, MetricQuery
from cutaway.serve.inspect.queries.text_pair import (
    Answers,
    ComparisonQuery,
    both_activations,
    describe_token,
    describe_top_tokens,
    find_answers,
)


class CompareTexts(ComparisonQuery):
    """Alignment of two texts, the top tokens of both, and the logit difference between the answers in both runs."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair = self.text_pair()
        data: dict[str, object] = {
            "token_pairs": pair.token_pairs,
            "source_pairs": pair.source_pairs,
            "changed_position": pair.changed_position,
        }
        if inspector.head is None:
            both_activations(inspector, pair, [], job)
            return QueryResult(data)
        answers = find_answers(inspector, pair, job)
        data |= {
            "clean": _describe_run(inspector, answers, answers.clean_logits),
            "changed": _describe_run(inspector, answers, answers.changed_logits),
            "answers": [describe_token(inspector, token) for token in (answers.clean_token, answers.changed_token)],
            "maps": list_patch_maps(inspector, pair),
            "is_patching_fast": is_fast(inspector, pair),
        }
        return QueryResult(data)


def _describe_run(inspector: Inspector, answers: Answers, logits: Tensor) -> dict[str, object]:
    """Top tokens, probabilities of both answers, and the logit difference between the answers."""
    probabilities = logits.softmax(-1)
    return {
        "top_tokens": describe_top_tokens(inspector, logits),
        "answer_probabilities": [float(probabilities[token]) for token in (answers.clean_token, answers.changed_token)],
        "logit_difference": float(answers.logit_difference(logits)),
    }


class CompareResidualStreams(ComparisonQuery):
    """Norm of the difference of both residual streams relative to the clean norm.

    A tensor per stack has one row for the embedding and one per block, and one column per pair of aligned positions.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair = self.text_pair()
        sites = {name: _resid_sites(inspector, name) for name in inspector.model.stacks}
        clean, changed = both_activations(inspector, pair, [name for names in sites.values() for name in names], job)
        tensors = {}
        for stack_name, names in sites.items():
            pairs = pair.pairs(is_source=stack_name == "encoder" and len(sites) > 1)
            if pairs:
                own, other = (torch.tensor(side) for side in zip(*pairs, strict=True))
                rows = [_relative_difference(clean[name][own], changed[name][other]) for name in names]
                tensors[stack_name] = torch.stack(rows)
        return QueryResult({}, tensors)


def _resid_sites(inspector: Inspector, stack_name: str) -> list[str]:
    """Sites of the residual stream after the embedding and after each block."""
    stack = inspector.model.stacks[stack_name]
    prefix = f"{stack_name}." if len(inspector.model.stacks) > 1 else ""
    return [f"{prefix}embed", *(f"{prefix}blocks.{layer}.resid_post" for layer in range(len(stack.blocks)))]


def _relative_difference(clean: Tensor, changed: Tensor) -> Tensor:
    """(P, d), (P, d) → (P,): norm of the difference divided by the norm of the clean vector."""
    clean, changed = clean.float(), changed.float()
    return (clean - changed).norm(dim=-1) / clean.norm(dim=-1).clamp(min=1e-12)


class CompareLogitLens(MetricQuery):
    """Logit lens of both texts at the selected position: the top token and the metric after each block."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair = self.text_pair()
        metric = self.choose_metric(inspector, pair, job)
        names = _resid_sites(inspector, [*inspector.model.stacks][-1])
        clean, changed = both_activations(inspector, pair, names, job)
        data = {
            "clean": [_decode_residual(inspector, metric, clean[name][pair.position]) for name in names],
            "changed": [_decode_residual(inspector, metric, changed[name][pair.changed_position]) for name in names],
        }
        return QueryResult(data)


def _decode_residual(inspector: Inspector, metric: Metric, residual: Tensor) -> dict[str, object]:
    """Logit lens of one vector: the top token, and the metric."""
    with torch.no_grad():
        logits = inspector.logits(inspector.output_stack.final_norm.forward(residual))
    top = int(logits.argmax())
    values = {"probability": float(logits.softmax(-1)[top]), "metric": float(metric.measure(logits))}
    return describe_token(inspector, top) | values


class CompareAttention(ComparisonQuery):
    """Total variation distance between the attention weights of both texts at the selected query, by layer and head.

    The weights of tokens without a counterpart in the other text are counted as different. `attn` and `cross` have one
    row per layer; heads that a layer does not have are NaN.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        pair = self.text_pair()
        query_sites = [name for name in inspector.sites if name.endswith(".q")]
        runs = both_activations(inspector, pair, query_sites, job)
        rows: dict[str, list[Tensor]] = {"attn": [], "cross": []}
        names: dict[str, list[str]] = {"attn": [], "cross": []}
        with inspector.lock, torch.no_grad():
            for name in runs[0].attention_calls:
                if inspector.sites[f"{name}.q"].stack is not inspector.output_stack:
                    continue
                kind = name.rsplit(".", 1)[-1]
                clean, changed = (
                    compute_attention_row(activations, f"{name}.pattern", position)[0]
                    for activations, position in zip(runs, (pair.position, pair.changed_position), strict=True)
                )
                rows[kind].append(total_variation(clean, changed, pair.pairs(is_source=kind == "cross")))
                names[kind].append(name)
        tensors = {
            kind: torch.nn.utils.rnn.pad_sequence(values, True, torch.nan) for kind, values in rows.items() if values
        }
        return QueryResult({"names": names}, tensors)


def total_variation(clean: Tensor, changed: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """Total variation distance of attention weights (H, S) and (H, S'), by head: half the sum of the differences.

    The rest to 1 (the weight of a sink) and each key without a counterpart are separate outcomes.
    """
    own, other = (torch.tensor(side, dtype=torch.long) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
    aligned, aligned_changed = clean[:, own], changed[:, other]
    total = (aligned - aligned_changed).abs().sum(-1)
    total += clean.sum(-1) - aligned.sum(-1) + changed.sum(-1) - aligned_changed.sum(-1)
    total += (clean.sum(-1) - changed.sum(-1)).abs()
    return (total / 2).clamp(min=0)
