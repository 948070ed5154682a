"""Query: effect of edits on next-token probabilities, residual norms, KL divergence and loss."""

import math
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.evaluate import functional
from cutaway.lens.analysis.ablation import TOP_K
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult, TokenIndex

LOGIT_CHUNK_SIZE = 32
"""Number of positions whose logits are computed at once. This limits memory for large vocabularies."""
EFFECT_CACHE: WeakKeyDictionary[ActivationCache, QueryResult] = WeakKeyDictionary()
"""Activation cache of an edited input → KL divergence and loss. An entry is removed with its activation cache."""


class EditEffect(InputQuery):
    """Top next tokens and residual norms before and after the edits, then KL divergence and loss of every token."""

    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        original = inspector.get_activations(self.input.without_edits, job)
        edited = inspector.get_activations(self.input, job)
        names = _residual_sites(inspector)
        norms = {
            "norms_before": torch.stack([original[name].float().norm(dim=-1) for name in names]),
            "norms_after": torch.stack([edited[name].float().norm(dim=-1) for name in names]),
        }
        data: dict[str, object] = {"sites": names}
        if inspector.head is None:
            return QueryResult(data, norms)
        position = min(self.position, len(self.input.tokens) - 1)
        logits = [compute_logits(inspector, cache, position, position + 1)[0] for cache in (original, edited)]
        data["top_tokens"] = _top_tokens_before_after(inspector, *logits)
        if edited not in EFFECT_CACHE:
            job.send_partial(QueryResult(data, norms))
            EFFECT_CACHE[edited] = _compute_kl_and_loss(inspector, original, edited, job)
        effect = EFFECT_CACHE[edited]
        return QueryResult({**data, **effect.data}, {**norms, **effect.tensors})


def _residual_sites(inspector: Inspector) -> list[str]:
    """Return the residual-stream sites after the embedding and each block, in the stack that feeds the head."""
    prefix = "decoder." if len(inspector.model.stacks) > 1 else ""
    outputs = [f"{prefix}blocks.{layer}.resid_post" for layer in range(len(inspector.output_stack.blocks))]
    return [f"{prefix}embed", *outputs]


def compute_logits(inspector: Inspector, activations: ActivationCache, start: int, end: int) -> Tensor:
    """Return the logits at positions start to end − 1: (end − start, V)."""
    prefix = "decoder." if len(inspector.model.stacks) > 1 else ""
    return inspector.logits(activations.values[f"{prefix}final_norm"][:, start:end])[0]


def _top_tokens_before_after(inspector: Inspector, before: Tensor, after: Tensor) -> list[dict[str, object]]:
    """Return the tokens that are in the top 5 before or after the edits, with both probabilities."""
    probabilities = before.softmax(-1), after.softmax(-1)
    count = min(TOP_K, len(before))
    top = [probability.topk(count).indices.tolist() for probability in probabilities]
    token_ids = dict.fromkeys(top[0] + top[1])
    return [
        {
            "token": token,
            "text": inspector.tokenizer.decode_token(token),
            "probability_before": _finite_or_none(probabilities[0][token]),
            "probability_after": _finite_or_none(probabilities[1][token]),
            "rank_before": top[0].index(token) if token in top[0] else None,
            "rank_after": top[1].index(token) if token in top[1] else None,
        }
        for token in token_ids
    ]


def _compute_kl_and_loss(
    inspector: Inspector, original: ActivationCache, edited: ActivationCache, job: QueryJob
) -> QueryResult:
    """Compute for each token the KL divergence, the top-5 overlap and the losses before and after the edits.

    `lens.analysis.ablation` averages the same values.
    """
    tokens = torch.tensor(original.model_input.tokens, device=inspector.model.device)
    length = len(tokens)
    has_targets = not isinstance(inspector.model, EncoderOnly) and length > 1
    chunks: list[dict[str, Tensor]] = []
    for start in range(0, length, LOGIT_CHUNK_SIZE):
        end = min(start + LOGIT_CHUNK_SIZE, length)
        job.report_progress(start, length, "comparing logits")
        before, after = compute_logits(inspector, original, start, end), compute_logits(inspector, edited, start, end)
        logprobs_before, logprobs_after = before.log_softmax(-1), after.log_softmax(-1)
        kl = functional.kl_divergence(logprobs_before.exp(), logprobs_before, logprobs_after)
        count = min(TOP_K, before.shape[-1])
        is_shared = (after.topk(count).indices[:, :, None] == before.topk(count).indices[:, None, :]).any(-1)
        chunk = {"kl": kl, "top5_overlap": is_shared.float().mean(-1)}
        if has_targets:
            targets = tokens[start + 1 : end + 1]
            for name, logprobs in (("loss_before", logprobs_before), ("loss_after", logprobs_after)):
                chunk[name] = F.nll_loss(logprobs[: len(targets)], targets, reduction="none")
        chunks.append(chunk)
        job.send_partial(QueryResult({"start": start}, {"kl": kl}))
    tensors = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
    means = {name: _finite_or_none(values.mean()) for name, values in tensors.items()}
    return QueryResult({"loss_before": None, "loss_after": None, **means}, tensors)


def _finite_or_none(value: Tensor) -> float | None:
    """Return a float, or None for inf and NaN, which JSON cannot represent."""
    number = float(value)
    return number if math.isfinite(number) else None
