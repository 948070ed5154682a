"""The proofs beside the picture, each as the largest difference found; and where a token's attention comes from."""

import torch

from cutaway.lens.attention_pattern import unpack_kernel_args
from cutaway.lens.sites import has_additive_residual, is_sublayer_output
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.inspector import Inspector
from cutaway.serve.inspect.protocol import QueryJob, QueryResult
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.base import InputQuery

NUM_CACHED_STEPS = 16
"""Tokens at the end of a text that are read one by one; those before them are read at once."""


class ConsistencyCheck(InputQuery):
    """embedding + Σ additions = stream; rows of patterns sum to 1; with a cache = without."""

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        kept = inspector.get_activations_at(self.input, [name for name in inspector.sites if name.endswith(".q")], job)
        job.report_progress(0, 3, "adding up the stream")
        sums = [
            apart
            for stack in inspector.model.stacks.values()
            if (apart := _residual_sum_error(inspector, kept, stack)) is not None
        ]
        job.report_progress(1, 3, "adding up attention")
        rows = _pattern_row_error(inspector, kept, job)
        job.report_progress(2, 3, "reading again, token after token")
        steps = _cache_error(inspector, kept, job)
        whole = len(sums) == len(inspector.model.stacks)
        return QueryResult(
            {
                "residual_sum_error": max(sums) if whole else None,
                "pattern_row_error": rows,
                "cache_error": steps[0],
                "max_abs_logit": steps[1],
                "eps": torch.finfo(inspector.model.dtype).eps,
            }
        )


def _residual_sum_error(inspector: Inspector, activations: ActivationCache, stack: object) -> float | None:
    """Over all tokens, relative to the stream; None where norms stand on the stream, which is then no sum."""
    own = [name for name, site in inspector.sites.items() if site.stack is stack]
    blocks = inspector.sites[own[0]].stack
    assert blocks is not None
    if activations.model_input.edits or not all(has_additive_residual(block) for block in blocks.blocks):
        return None
    total = activations[next(name for name in own if name.endswith("embed"))]
    for name in own:
        total = total + activations[name] if is_sublayer_output(name) else total
    last = activations[next(name for name in reversed(own) if name.endswith("resid_post"))]
    return float((total - last).abs().max() / last.abs().max().clamp(min=1e-30))


def _pattern_row_error(inspector: Inspector, activations: ActivationCache, job: QueryJob) -> float | None:
    """Of all patterns, made layer by layer; None where sinks take a share everywhere."""
    worst = None
    with inspector.lock, torch.no_grad():
        for name, (_, args) in activations.attention_calls.items():
            job.check_cancelled()
            if unpack_kernel_args(args)[-1] is None:
                apart = float((activations.recompute_attention(name).pattern().float().sum(-1) - 1).abs().max())
                worst = apart if worst is None else max(worst, apart)
    return worst


def _cache_error(
    inspector: Inspector, activations: ActivationCache, job: QueryJob
) -> tuple[float | None, float | None]:
    """The last tokens' logits, each in a step of its own with a cache, against one pass; and the largest logit."""
    look, model = activations.model_input, inspector.model
    if isinstance(model, EncoderOnly) or getattr(model, "head", None) is None:
        return None, None
    tokens = torch.tensor([look.tokens], device=model.device)
    source = None if look.source is None else torch.tensor([look.source], device=model.device)
    length = tokens.shape[1]
    alone = max(1, length - NUM_CACHED_STEPS)
    whole = inspector.logits(activations[final_norm_site(inspector)][alone - 1 :])
    worst, cache = 0.0, model.new_cache(1, length)
    for at in range(alone - 1, length):
        job.check_cancelled()
        with inspector.edited_model(look):  # between steps others may ask
            piece = tokens[:, :alone] if at == alone - 1 else tokens[:, at : at + 1]
            first = source if at == alone - 1 else None
            given_now = (first, piece) if isinstance(model, EncoderDecoder) else (piece,)
            said = model(*given_now, cache=cache)[0, -1].float()
            worst = max(worst, float((said - whole[at - alone + 1]).abs().max()))
    return worst, float(whole.abs().max())
