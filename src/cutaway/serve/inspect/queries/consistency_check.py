"""Query: maximum errors of three consistency checks: residual sums, pattern rows and the KV cache."""

import torch

from cutaway.lens.attention_pattern import unpack_kernel_args
from cutaway.lens.sites import has_additive_residual, is_sublayer_output
from cutaway.model import EncoderDecoder, EncoderOnly
from cutaway.model.stack import Stack
from cutaway.serve.inspect.activation_cache import ActivationCache
from cutaway.serve.inspect.queries.activation import final_norm_site
from cutaway.serve.inspect.queries.base import InputQuery, Inspector, QueryJob, QueryResult

NUM_CACHED_STEPS = 16
"""Number of tokens at the end of the text that are decoded one by one. Earlier tokens are prefilled."""


class ConsistencyCheck(InputQuery):
    """Maximum errors of three consistency checks.

    These are: embedding + Σ sublayer outputs = residual stream after the last block; rows of attention patterns sum to
    1; logits with KV cache = logits without.
    """

    def run(self, inspector: Inspector, job: QueryJob) -> QueryResult:
        query_sites = [name for name in inspector.sites if name.endswith(".q")]
        activations = inspector.get_activations_at(self.input, query_sites, job)
        job.report_progress(0, 3, "summing the residual stream")
        stacks = inspector.model.stacks.values()
        by_stack = [_residual_sum_error(inspector, activations, stack) for stack in stacks]
        residual_errors = [error for error in by_stack if error is not None]
        job.report_progress(1, 3, "summing attention patterns")
        pattern_row_error = _pattern_row_error(inspector, activations, job)
        job.report_progress(2, 3, "decoding with the KV cache")
        cache_error, max_abs_logit = _cache_error(inspector, activations, job)
        data = {
            "residual_sum_error": max(residual_errors) if len(residual_errors) == len(by_stack) else None,
            "pattern_row_error": pattern_row_error,
            "cache_error": cache_error,
            "max_abs_logit": max_abs_logit,
            "eps": torch.finfo(inspector.model.dtype).eps,
        }
        return QueryResult(data)


def _residual_sum_error(inspector: Inspector, activations: ActivationCache, stack: Stack) -> float | None:
    """Return the largest |embedding + Σ sublayer outputs − residual stream| over all tokens.

    It is relative to the largest absolute value of the residual stream after the last block. Return None if the input
    has edits, or if the residual stream is not such a sum, because it is normalized (post-norm) or scaled.
    """
    site_names = [name for name, site in inspector.sites.items() if site.stack is stack]
    site_stack = inspector.sites[site_names[0]].stack
    assert site_stack is not None
    if activations.model_input.edits or not has_additive_residual(site_stack):
        return None
    total = activations[next(name for name in site_names if name.endswith("embed"))]
    for name in site_names:
        total = total + activations[name] if is_sublayer_output(name) else total
    last = activations[next(name for name in reversed(site_names) if name.endswith("resid_post"))]
    return float((total - last).abs().max() / last.abs().max().clamp(min=1e-30))


def _pattern_row_error(inspector: Inspector, activations: ActivationCache, job: QueryJob) -> float | None:
    """Return the maximum |row sum − 1| of the patterns without a sink, or None if all attentions have sinks."""
    max_error = None
    with inspector.lock, torch.no_grad():
        for name, (_, args) in activations.attention_calls.items():
            job.check_cancelled()
            if unpack_kernel_args(args)[-1] is None:
                error = float((activations.recompute_attention(name).pattern().float().sum(-1) - 1).abs().max())
                max_error = error if max_error is None else max(max_error, error)
    return max_error


def _cache_error(
    inspector: Inspector, activations: ActivationCache, job: QueryJob
) -> tuple[float | None, float | None]:
    """Return max |logit with KV cache − logit without| and max |logit| over the last tokens of the input.

    Return (None, None) if the model is an encoder or has no head.
    """
    model_input, model = activations.model_input, inspector.model
    if isinstance(model, EncoderOnly) or inspector.head is None:
        return None, None
    tokens, source = inspector.to_tensors(model_input)
    length = tokens.shape[1]
    num_prefill = max(1, length - NUM_CACHED_STEPS)
    full_logits = inspector.logits(activations[final_norm_site(inspector)][num_prefill - 1 :])
    max_error, cache = 0.0, model.new_cache(1, length)
    for position in range(num_prefill - 1, length):
        job.check_cancelled()
        with inspector.edited_model(model_input):  # the lock is released between steps, so that other queries can run
            token_ids = tokens[:, :num_prefill] if position == num_prefill - 1 else tokens[:, position : position + 1]
            encoder_input = source if position == num_prefill - 1 else None
            args = (encoder_input, token_ids) if isinstance(model, EncoderDecoder) else (token_ids,)
            logits = model(*args, cache=cache)[0, -1].float()
            max_error = max(max_error, float((logits - full_logits[position - num_prefill + 1]).abs().max()))
    return max_error, float(full_logits.abs().max())
