"""What a change does: the same text in the model as it is and in the changed one, and what was trained that way."""

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from cutaway.evaluate import functional
from cutaway.lens.analysis.ablation import TOP_K
from cutaway.model import EncoderOnly
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.base import InputQuery, TokenIndex

LOGIT_CHUNK_SIZE = 32
"""Tokens whose logits are made at once: of a large vocabulary, whole texts would take gigabytes."""
EFFECT_CACHE: WeakKeyDictionary[ActivationCache, dict[str, Any]] = WeakKeyDictionary()
"""What was worked out for passes that are kept, as long as they are."""


class EditEffect(InputQuery):
    """What a token would say before and after, how long the stream is; then every token's KL and loss, as they come."""

    position: TokenIndex

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        plain, changed = (
            inspector.get_activations(self.input.without_edits, job),
            inspector.get_activations(self.input, job),
        )
        names = residual_sites(inspector)
        lengths = {
            "norms_before": torch.stack([plain[name].float().norm(dim=-1) for name in names]),
            "norms_after": torch.stack([changed[name].float().norm(dim=-1) for name in names]),
        }
        facts: dict[str, Any] = {"sites": names}
        if getattr(inspector.model, "head", None) is None:
            return QueryResult(facts, lengths)
        at = min(self.position, len(self.input.tokens) - 1)
        facts["top_tokens"] = top_tokens_before_after(
            inspector,
            compute_logits(inspector, plain, at, at + 1)[0],
            compute_logits(inspector, changed, at, at + 1)[0],
        )
        if changed not in EFFECT_CACHE:
            job.send_partial(QueryResult(facts, lengths))
            EFFECT_CACHE[changed] = compute_kl_and_loss(inspector, plain, changed, job)
        told = EFFECT_CACHE[changed]
        return QueryResult(facts | told["data"], lengths | told["tensors"])


def residual_sites(inspector: Inspector) -> list[str]:
    """Of the stream that becomes logits: behind the embedding and each block."""
    prefix = "decoder." if len(inspector.model.stacks) > 1 else ""
    return [name for name in inspector.sites if name == f"{prefix}embed" or _is_block_output(name, prefix)]


def _is_block_output(site_name: str, prefix: str) -> bool:
    return site_name.startswith(f"{prefix}blocks.") and site_name.endswith(".resid_post")


def compute_logits(inspector: Inspector, activations: ActivationCache, start: int, end: int) -> Tensor:
    """Logits of some tokens, (n, V)."""
    prefix = "decoder." if len(inspector.model.stacks) > 1 else ""
    return inspector.logits(activations.values[f"{prefix}final_norm"][:, start:end])[0]


def top_tokens_before_after(inspector: Inspector, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """The likeliest five of each, with both shares: exact, over the whole vocabulary."""
    shares = before.softmax(-1), after.softmax(-1)
    count = min(TOP_K, len(before))
    best = [each.topk(count).indices.tolist() for each in shares]
    every = dict.fromkeys(best[0] + best[1])
    return [
        {
            "token": token,
            "text": inspector.tokenizer.decode_token(token),
            "probability_before": _finite_or_none(shares[0][token]),
            "probability_after": _finite_or_none(shares[1][token]),
            "rank_before": best[0].index(token) if token in best[0] else None,
            "rank_after": best[1].index(token) if token in best[1] else None,
        }
        for token in every
    ]


def compute_kl_and_loss(
    inspector: Inspector, original: ActivationCache, edited: ActivationCache, job: QueryJob
) -> dict[str, Any]:
    """KL and loss by token, slice by slice; what `lens.analysis.ablation` averages."""
    tokens = torch.tensor(original.model_input.tokens, device=inspector.model.device)
    length = len(tokens)
    next_ones = not isinstance(inspector.model, EncoderOnly) and length > 1
    found: dict[str, list[Tensor]] = {"kl": [], "top5_overlap": [], "loss_before": [], "loss_after": []}
    for low in range(0, length, LOGIT_CHUNK_SIZE):
        high = min(low + LOGIT_CHUNK_SIZE, length)
        job.report_progress(low, length, "comparing what is said")
        before, after = compute_logits(inspector, original, low, high), compute_logits(inspector, edited, low, high)
        told, was = after.log_softmax(-1), before.log_softmax(-1)
        kl = functional.kl_divergence(was.exp(), was, told)
        count = min(TOP_K, before.shape[-1])
        mine, theirs = after.topk(count).indices, before.topk(count).indices
        found["kl"].append(kl)
        found["top5_overlap"].append((mine[:, :, None] == theirs[:, None, :]).any(-1).float().mean(-1))
        if next_ones:
            targets = tokens[low + 1 : high + 1]
            found["loss_before"].append(F.nll_loss(was[: len(targets)], targets, reduction="none"))
            found["loss_after"].append(F.nll_loss(told[: len(targets)], targets, reduction="none"))
        job.send_partial(QueryResult({"start": low}, {"kl": kl}))
    arrays = {name: torch.cat(each) for name, each in found.items() if each}
    facts = {name: _finite_or_none(each.mean()) for name, each in arrays.items()}
    return {"data": {"loss_before": None, "loss_after": None} | facts, "tensors": arrays}


def _finite_or_none(value: Tensor) -> float | None:
    """JSON has no other numbers."""
    number = float(value)
    return number if math.isfinite(number) else None
